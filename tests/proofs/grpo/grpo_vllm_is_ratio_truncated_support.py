"""Train two optimizer steps of two micro-batches with the real GRPO, and evaluate, with a vLLM that keeps eight tokens.

vLLM is replaced by a Llama of its own with the weights of the policy. It answers with the completions of ``tiny.grpo``,
and with the log-probs of their tokens over the eight most likely ones, at the temperature of the run. So the ratio of
the two engines is 1, and with the bug the probability of the kept tokens. Gradients are compared with those of the loss
(arXiv:2402.03300) times that ratio, computed without TRL.
"""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import trl

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
MUTANTS_ON = ("1.14.2",)
EQUIVALENT = {
    "_log_mass: `last = ((probs.cumsum(-1) - probs) < top_p).sum(-1, keepdim=True) - 1` -> "
    "`last = ((probs.cumsum(-1) - probs) <= top_p).sum(-1, keepdim=True) - 1`": "no sum is just top_p",
}

ID = "grpo-vllm-is-ratio-truncated-support"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"
STEPS, MICRO_BATCHES, GROUP = 2, 2, 4
TEMPERATURE = 0.7


def train() -> tiny.TrainingResult:
    return _result(top_k=8)


def unaffected() -> tiny.TrainingResult:
    """Train with a vLLM that samples from all tokens."""
    return _result(top_k=0)


def _result(top_k: int) -> tiny.TrainingResult:
    if not hasattr(getattr(trl, "GRPOTrainer", None), "_generate_single_turn"):
        return tiny.TrainingResult(absent("GRPO does not compare its log-probs with vLLM's processed ones"))
    run = _Run(top_k)
    outcome = run.judged()
    if top_k:
        return tiny.result_of_runs({"GRPO": run}, outcome)
    assert outcome.verdict is Verdict.FIXED, outcome
    assert not run.acted, "the wrapper acts on a vLLM that samples from all tokens"
    return tiny.result_of_runs({"GRPO": run}, absent("vLLM samples from all tokens"))


class _Run:
    """A run of the real trainer with a vLLM that keeps this many tokens; all of them if it is 0."""

    def __init__(self, top_k: int) -> None:
        self.top_k = top_k
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            for model in (policy, self.policy):
                # Scaled, the head gives probabilities that differ.
                model.get_output_embeddings().weight.data *= 5
            trainer = tiny.grpo(
                tiny.stepwise(trl.GRPOTrainer),
                policy,
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=GROUP,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                loss_type="bnpo",
                scale_rewards="none",
                temperature=TEMPERATURE,
                shuffle_dataset=False,
                **({"top_k": top_k} if top_k else {}),
            )
            self.trainer, self.generate = trainer, trainer._generate_single_turn
            settings = {"use_vllm": True, "vllm_mode": "colocate", "_generate_single_turn": self._generate_as_vllm}
            vars(trainer).update(settings)
            trainer.train()
            weights = {name: value.detach().clone() for name, value in policy.state_dict().items()}
            trainer.evaluate(trainer.train_dataset.select(range(GROUP)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        self.batches = [(step.weights, part.inputs) for step in self.steps for part in step.micro_batches]
        self.batches += [(weights, part.inputs) for part in self.evaluations]
        self.acted = bool(tiny.acts(ID, TARGET, trainer))

    def _generate_as_vllm(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Return what the trainer samples without vLLM, with vLLM's log-probs."""
        # The prompts are the first argument: their tokens, or in early releases the first result has these.
        with mock.patch.object(self.trainer, "use_vllm", False):
            result = self.generate(*args, **kwargs)
        prompts, completions = result[:2] if len(result) > 3 else (args[0], result[0])
        self.policy.load_state_dict(self.trainer.model.state_dict())
        log_probs = []
        for prompt, completion in zip(prompts, completions, strict=True):
            of_tokens, masses = self._scores(prompt, completion)
            log_probs.append((of_tokens - masses.log()).tolist())
        return tuple(log_probs if part is None else part for part in result)

    def _scores(self, prompt: list[int], completion: list[int]) -> tuple[Any, Any]:
        """Return the log-probs of the completion over all tokens, and the probability of the tokens that are kept."""
        import torch

        with torch.no_grad():
            log_probs = _log_probs(self.policy, prompt, completion)
        sampled = log_probs.gather(1, torch.tensor(completion)[:, None])
        if not self.top_k:
            return sampled[:, 0], torch.ones(len(completion))
        # vLLM has kept what it sampled.
        least = torch.minimum(log_probs.topk(self.top_k).values[:, -1:], sampled)
        return sampled[:, 0], torch.where(log_probs >= least, log_probs.exp(), 0.0).sum(1)

    def judged(self) -> Outcome:
        """Judge the ratios of all calls; the gradients must be those of the loss with these ratios."""
        import torch

        numbers = []
        for number, (weights, batch) in enumerate(self.batches):
            self.policy.load_state_dict(weights)
            measured = self._of_rows(batch, batch["importance_sampling_ratio"])
            wrong = [self._scores(*row)[1] for row in _rows(batch)]
            if batch["importance_sampling_ratio"].shape[1] == 1:
                wrong = [masses.prod()[None] for masses in wrong]
            ratios = [torch.cat(values) for values in (measured, [torch.ones_like(row) for row in wrong], wrong)]
            factors = torch.cos(torch.arange(float(len(ratios[0]))) + number)
            numbers.append([float((factors * values).sum()) for values in ratios])
        measured_sum, right, wrong_sum = (sum(values) for values in zip(*numbers, strict=True))
        outcome = judge(measured_sum, right=right, wrong=wrong_sum)
        for measured_part, right_part, wrong_part in numbers:
            expected = right_part if outcome.verdict is Verdict.FIXED else wrong_part
            assert abs(measured_part - expected) < 1e-4, numbers
        self._compare(has_bug=outcome.verdict is not Verdict.FIXED)
        return outcome

    def _of_rows(self, batch: dict[str, Any], values: Any) -> list[Any]:
        if values.shape[1] == 1:
            return list(values)
        return [row[: len(completion)] for row, (_, completion) in zip(values, _rows(batch), strict=True)]

    def _compare(self, *, has_bug: bool) -> None:
        for number, step in enumerate(self.steps):
            assert len(step.micro_batches) == MICRO_BATCHES
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, has_bug, factor))
                )
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert min(differences) < 1e-5 * max(1.0, largest), (number, differences, largest)
            assert largest > 0.0

    def _loss_of(self, step: tiny.Step, has_bug: bool, factor: float) -> Any:
        def loss(model: Any) -> Any:
            return sum(self._loss(model, part.inputs, has_bug) for part in step.micro_batches) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], has_bug: bool) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        gains = []
        for (prompt, completion), advantage in zip(_rows(batch), batch["advantages"], strict=True):
            log_probs = _log_probs(model, prompt, completion).gather(1, torch.tensor(completion)[:, None])[:, 0]
            gain = advantage * (log_probs - log_probs.detach()).exp()
            if has_bug and self.top_k:
                masses = self._scores(prompt, completion)[1]
                gain = gain * (masses.prod() if batch["importance_sampling_ratio"].shape[1] == 1 else masses)
            gains.append(gain)
        return -torch.cat(gains).mean()


def _log_probs(model: Any, prompt: list[int], completion: list[int]) -> Any:
    """Return those of all tokens at each place of the completion."""
    import torch

    logits = model(input_ids=torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    return (logits / TEMPERATURE).log_softmax(-1)


def _rows(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return the prompts and the completions of a batch without their padding."""
    parts = [
        [row[kept.bool()].tolist() for row, kept in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]
    return list(zip(*parts, strict=True))
