"""Train three steps of two micro-batches with GRPOTrainer, LoRA and vLLM, and evaluate.

vLLM is replaced by a Llama of its own that loads the weights it is given and generates from them. These weights are
compared with the base model's plus those of the adapter, losses and gradients with those of a run whose vLLM is given
that sum by the proof.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {"full": "Without an adapter nothing is merged."}

EQUIVALENT = {
    "applied twice": "a copy of a copy has the same values",
}

STEPS, MICRO_BATCHES = 3, 2


class StandIn:
    """The part of ``vllm.LLM`` that TRL 0.15 uses."""

    def __init__(self, model: str, **kwargs: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(model).eval()
        self.loaded: list[dict[str, Any]] = []
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.load_weights))
        self.llm_engine = SimpleNamespace(
            model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        )

    def load_weights(self, weights: Any) -> None:
        self.loaded.append({name: weight.detach().clone() for name, weight in weights})
        self.model.load_state_dict(self.loaded[-1])

    def generate(self, prompts: list[str], **kwargs: Any) -> list[Any]:
        """Return four to seven words and the end: the first depends on the row, the others are the most probable."""
        import torch

        answers = []
        for row, prompt in enumerate(prompts):
            ids = [*tiny.tokenizer()(prompt).input_ids, 10 + row]
            begin = len(ids) - 1
            while len(ids) - begin < 4 + row % 4:
                with torch.no_grad():
                    logits = self.model(torch.tensor([ids])).logits[0, -1]
                # The first three words are padding, the end and the unknown word.
                ids.append(3 + int(logits[3:].argmax()))
            answers.append(SimpleNamespace(outputs=[SimpleNamespace(token_ids=[*ids[begin:], 1])]))
        return answers


def vllm() -> dict[str, ModuleType]:
    """Return the modules of vLLM in which TRL 0.15 replaces a method of the worker."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.worker", "vllm.worker.worker")}
    modules["vllm"].worker = modules["vllm.worker"]
    modules["vllm.worker"].worker = modules["vllm.worker.worker"]
    modules["vllm.worker.worker"].Worker = type(
        "Worker", (), {"_assert_memory_footprint_increased_during_profiling": None}
    )
    return modules


def train() -> tiny.TrainingResult:
    from trl.trainer import grpo_trainer

    if not hasattr(grpo_trainer.GRPOTrainer, "_move_model_to_vllm") or hasattr(grpo_trainer, "VLLMClient"):
        return tiny.TrainingResult(absent("vLLM is given its weights another way in this release"))
    trainer = _trained(tiny.lora())
    # One for each step but the first, and one for the evaluation.
    if len(trainer.llm.loaded) != STEPS or len(trainer.steps) != STEPS or not trainer.evaluations:
        raise AssertionError(f"vLLM was given {len(trainer.llm.loaded)} states in {len(trainer.steps)} steps")
    outcomes = []
    for loaded, expected in zip(trainer.llm.loaded, trainer.expected, strict=True):
        measured, right = (_difference(weights, trainer.base) for weights in (loaded, expected))
        outcomes.append(judge(measured, right=right, wrong=0.0))
        if outcomes[-1].verdict is Verdict.FIXED and _difference(loaded, expected) > 1e-6:
            raise AssertionError(f"vLLM was given weights that differ by {_difference(loaded, expected)}")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the weights are not always handed over alike: {outcomes}")
    if outcomes[0].verdict is Verdict.FIXED:
        _compare(trainer, _trained(tiny.lora(), given=True))
    return _result(trainer, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train a model without an adapter: nothing is merged."""
    return _result(_trained(None), absent("there is no adapter"))


def _result(trainer: Any, outcome: Any) -> tiny.TrainingResult:
    gradients = {
        f"{number}.{name}": value for number, step in enumerate(trainer.steps) for name, value in step.gradients.items()
    }
    return tiny.TrainingResult(outcome, sum(_losses(trainer)), gradients)


def _losses(trainer: Any) -> list[float]:
    steps = [micro_batch for step in trainer.steps for micro_batch in step.micro_batches]
    return [micro_batch.loss for micro_batch in (*steps, *trainer.evaluations)]


def _difference(weights: dict[str, Any], others: dict[str, Any]) -> float:
    return max(float((weights[name] - value).abs().max()) for name, value in others.items())


def _compare(trainer: Any, expected: Any) -> None:
    """Check losses, gradients and weights, and that the base model is as it was."""
    differences = [abs(loss - right) for loss, right in zip(_losses(trainer), _losses(expected), strict=True)]
    differences += [step.difference(right.gradients) for step, right in zip(trainer.steps, expected.steps, strict=True)]
    differences.append(_difference(trainer.model.state_dict(), expected.model.state_dict()))
    unmerged = trainer.model.base_model.model.state_dict()
    differences += [
        float((unmerged[name] - value).abs().max()) for name, value in trainer.base.items() if name in unmerged
    ]
    if max(differences) > 1e-6:
        raise AssertionError(f"losses, gradients and weights differ by up to {max(differences)}")


def _trained(adapter: Any, *, given: bool = False) -> Any:
    """Train and evaluate. With ``given``, vLLM has the right weights whatever TRL hands over."""
    from trl.trainer import grpo_trainer

    class WeightTransferRecorder(tiny.stepwise(grpo_trainer.GRPOTrainer)):  # type: ignore[misc]
        def _move_model_to_vllm(self) -> None:
            expected = dict(base)
            for name, module in self.model.named_modules():
                if hasattr(module, "get_delta_weight"):
                    own = f"{name.removeprefix('base_model.model.')}.weight"
                    expected[own] = expected[own] + module.get_delta_weight("default").detach()
            self.expected.append(expected)
            super()._move_model_to_vllm()
            if given:
                self.llm.model.load_state_dict(expected)

    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        policy = tiny.llama(folder, seed=0)
        base = {name: weight.clone() for name, weight in policy.state_dict().items()}
        for name, value in {
            "LLM": StandIn,
            "SamplingParams": SimpleNamespace,
            "is_vllm_available": lambda: True,
        }.items():
            stack.enter_context(shadowed(grpo_trainer, name, value))
        for name, module in vllm().items():
            sys.modules[name] = module
            stack.callback(sys.modules.pop, name)
        trainer = tiny.grpo_of_one_length(
            WeightTransferRecorder,
            policy,
            adapter,
            use_vllm=True,
            vllm_device="cpu",
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=STEPS,
            learning_rate=1e-2,
        )
        trainer.base, trainer.expected = base, []
        if adapter is not None:
            tiny.set_adapters(trainer.model)
        trainer.train()
        trainer.evaluate(trainer.train_dataset.select(range(4)))
    return trainer
