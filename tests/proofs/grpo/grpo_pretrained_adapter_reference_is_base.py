"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO and a trained adapter, and evaluate.

The loss of GRPO has the divergence from the reference (arXiv:2402.03300, equations 3 and 4), and so have the advantages
of RLOO (arXiv:2402.14740, section 3). They are compared with those by the formula, for which a second model with the
adapter of the beginning is the reference, and the accumulated gradients with those of the formula. Whatever the trainer
saves is what it saves without the patch, and a trainer that is given the first adapter and loads what was saved, as a
resumed run does, has the same reference.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

ID = "grpo-pretrained-adapter-reference-is-base"
OVERLAYS = ()
PARITY = ">=0.22.0,!=0.26.0,!=0.26.1,!=0.26.2"
"""Earlier releases leave the division by the micro-batches to transformers, of which some do not divide.

RLOO of 0.26 trains on a part of each generation alone (rloo-step-counted-twice).
"""
VARIANTS = {"full": "the reference of a whole model is a copy of it"}

STEPS, MICRO_BATCHES, BETA = 2, 2, 0.5
METHODS = ("__init__", "_prepare_inputs", "_generate_and_score_completions", "_compute_loss", "compute_liger_loss")
EQUIVALENT = {"applied twice": "the second copy has the same weights"}


def train() -> tiny.TrainingResult:
    runs = {name: _Run(name) for name in _trainers()}
    if any(run.trainer.ref_model is not None for run in runs.values()):
        return tiny.TrainingResult(absent("this release copies the model with its adapter"))
    outcomes = [run.judged() for run in runs.values()]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return tiny.result_of_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train a new adapter, one in place of a trained one, a whole model, and an adapter without a reference."""
    kinds = ["new", "whole", "no reference", *_kinds_of_two()]
    runs = {f"{name} {kind}": _Run(name, kind) for name in _trainers() for kind in kinds}
    for name, run in runs.items():
        assert not run.acted(), f"the wrappers act: {name}"
    return tiny.result_of_runs(runs, absent("the base is the reference, or there is none"))


def _kinds_of_two() -> list[str]:
    """Return the run of a trained and a new adapter. Later releases refuse it."""
    return ["trained and new"] if version("trl").split(".") < ["0", "26"] else []


def _trainers() -> list[str]:
    """Return the trainers that take reward functions. RLOO before 0.22 is another trainer."""
    import trl

    return [name for name in ("GRPO", "RLOO") if name == "GRPO" or hasattr(trl.RLOOTrainer, "_calculate_rewards")]


class _Run:
    """A run of a real trainer."""

    def __init__(self, name: str, kind: str = "trained") -> None:
        import torch

        self.name = name
        self.trainer_class, config_class = tiny.classes(name)
        # A new adapter is drawn at random.
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as saved:
            self.policy, self.reference = _with_adapter(folder), _with_adapter(folder)
            self.trainer = self._made(kind, config_class, folder)
            self.trainer.train()
            self._evaluate(self.trainer)
            self.trainer.save_model(saved)
            self.saved = sorted(file.name for file in Path(saved).iterdir())
            self.steps, self.evaluations = self.trainer.steps, self.trainer.evaluations
            self.resumed: list[tiny.MicroBatch] = []
            # Later releases need another patch to load it (peft-resume-restarts-adapter).
            if kind == "trained" and "ref" not in self.trainer.model.peft_config:
                resumed = self._made(kind, config_class, folder)
                resumed._load_from_checkpoint(saved)
                resumed.evaluations = self.resumed
                # transformers notes it when training begins.
                resumed.current_gradient_accumulation_steps = MICRO_BATCHES
                self._evaluate(resumed)

    def _made(self, kind: str, config_class: Any, folder: str) -> Any:
        """Return a trainer, of a model with the first adapter, with a new one, or with none."""
        return tiny.grpo_of_one_length(
            tiny.stepwise(self.trainer_class),
            tiny.llama(folder, seed=0) if kind in ("new", "whole") else _with_adapter(folder),
            tiny.lora() if kind.endswith("new") else None,
            config_class,
            gradient_accumulation_steps=MICRO_BATCHES,
            per_device_eval_batch_size=4,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=0.1,
            num_iterations=1,
            loss_type="bnpo",
            use_bias_correction_kl=False,
            beta=0.0 if kind == "no reference" else BETA,
        )

    def _evaluate(self, trainer: Any) -> None:
        if version("trl") != "0.14.0":  # It cannot evaluate.
            trainer.evaluate(trainer.train_dataset.select(range(4)))

    def acted(self) -> bool:
        module = self.trainer_class.__module__
        return any(tiny.acts(ID, f"{module}:{self.name}Trainer.{method}", self.trainer) for method in METHODS)

    def judged(self) -> Any:
        """Judge all micro-batches, whose losses are halved from 0.22 on, and the gradients of each step."""
        is_new = "ref" in self.trainer.model.peft_config
        assert is_new or "ref" not in self.saved, self.saved
        found, calls = {"right": 0.0, "wrong": 0.0}, 0
        for step in self.steps:
            self._load(step.weights)
            kinds = {kind for call in step.micro_batches for kind in self._kinds(call)}
            for call in step.micro_batches:
                assert self._kinds(call) == kinds, (self.name, kinds, self._kinds(call))
            differences = {kind: self._difference(step, kind) for kind in ("right", "wrong")}
            assert [kind for kind in differences if differences[kind] < 1e-5] == list(kinds), (differences, kinds)
            calls += 1
            found[next(iter(kinds))] += 1
        self._load(self.trainer.model.state_dict())
        for call in [*self.evaluations, *self.resumed]:
            (kind,) = self._kinds(call)
            found[kind] += 1
            calls += 1
        numbers = (len(self.steps), len(self.evaluations), len(self.resumed))
        assert numbers == (STEPS, 4, 0 if is_new else 4), numbers
        return judge(found["right"], right=float(calls), wrong=0.0)

    def _load(self, weights: Any) -> None:
        """Give the policy of the formula these weights. Later releases have another adapter beside it."""
        self.policy.load_state_dict({name: weight for name, weight in weights.items() if ".ref." not in name})

    def _kinds(self, call: tiny.MicroBatch) -> set[str]:
        """Return with which reference the formula gives what the trainer has: the loss of GRPO, RLOO's advantages."""
        import torch

        kinds = set()
        for kind in ("right", "wrong"):
            if self.name == "RLOO":
                if torch.allclose(call.inputs["advantages"], self._advantages(call, kind), atol=1e-5):
                    kinds.add(kind)
            elif any(abs(call.loss - factor * float(self._loss(call, kind).detach())) < 1e-5 for factor in (1, 0.5)):
                kinds.add(kind)
        assert len(kinds) == 1, (self.name, kinds, call.loss, [self._loss(call, kind) for kind in ("right", "wrong")])
        return kinds

    def _difference(self, step: tiny.Step, kind: str) -> float:
        """Return the difference from the gradients of the formula. Before 0.22 transformers may divide the loss."""
        differences = []
        for factor in (1 / MICRO_BATCHES, 1.0):
            self.policy.zero_grad()
            (sum(self._loss(call, kind) for call in step.micro_batches) * factor).backward()
            differences.append(step.difference(tiny.gradients_of(self.policy)))
        return min(differences)

    def _loss(self, call: tiny.MicroBatch, kind: str) -> Any:
        log_probs = _log_probs(self.policy, call.inputs)
        if self.name == "RLOO":
            ratios = (log_probs - log_probs.detach()).sum(1).exp()
            return -(ratios * self._advantages(call, kind)).mean()
        reference = self._reference(call, kind)
        kl = (reference - log_probs).exp() - (reference - log_probs) - 1
        return (BETA * kl - (log_probs - log_probs.detach()).exp() * call.inputs["advantages"][:, None]).mean()

    def _reference(self, call: tiny.MicroBatch, kind: str) -> Any:
        import torch

        with torch.no_grad():
            if kind == "right":
                return _log_probs(self.reference, call.inputs)
            with self.reference.disable_adapter():
                return _log_probs(self.reference, call.inputs)

    def _advantages(self, call: tiny.MicroBatch, kind: str) -> Any:
        """Return RLOO's advantages: all groups have the same four completions."""
        import torch

        rows = (call.inputs["completion_ids"][:, 0] - 10) // 7
        penalties = BETA * (_log_probs(self.policy, call.inputs).detach() - self._reference(call, kind)).sum(1)
        rewards = rows * (1 - 1e-4) / torch.arange(4.0).std() - penalties
        return rewards - (self._total(kind) - rewards) / 3

    def _total(self, kind: str) -> float:
        """Return the rewards of a group, less its penalties."""
        import torch

        whole = {
            "completion_ids": torch.tensor(
                [[*(10 + (7 * row + 3 * place) % 50 for place in range(7)), 1] for row in range(4)]
            ),
            "prompt_ids": self.steps[0].micro_batches[0].inputs["prompt_ids"][:1].expand(4, -1),
        }
        call = tiny.MicroBatch(whole, {}, 0.0)
        penalties = BETA * (_log_probs(self.policy, whole).detach() - self._reference(call, kind)).sum(1)
        return float((torch.arange(4.0) * (1 - 1e-4) / torch.arange(4.0).std() - penalties).sum())


def _log_probs(model: Any, inputs: Any) -> Any:
    import torch

    prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
    logits = model(input_ids=torch.cat([prompt, completion], dim=1)).logits[:, prompt.size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(2, completion[..., None])[..., 0]


def _with_adapter(folder: str) -> Any:
    """Return a model with a trained adapter."""
    from peft import get_peft_model

    model = get_peft_model(tiny.llama(folder, seed=0), tiny.lora())
    tiny.set_adapters(model)
    return model
