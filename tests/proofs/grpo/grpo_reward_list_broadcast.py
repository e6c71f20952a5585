"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO, whose reward function errs in the second.

Two functions return a reward for each completion. In the second step and in the evaluation the other one returns a
single reward. The run must end there with an error that tells so. Where it goes on, that reward is the one of all
completions. The advantages of each micro-batch are compared with the formulas (arXiv:2402.03300, section 4.1.2, and
arXiv:2402.14740, section 3), and the gradients with those of the losses on them, computed without TRL.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome

import tiny

OVERLAYS = ()
PARITY = ">=0.22.0,!=0.26.0,!=0.26.1,!=0.26.2"
"""Earlier releases leave the division by the micro-batches to transformers, of which some do not divide.

RLOO of 0.26 trains on a part of each generation alone (rloo-step-counted-twice).
"""

ID = "grpo-reward-list-broadcast"
STEPS, MICRO_BATCHES = 2, 2
LENGTHS = (2, 4, 8, 6)
REWARDS: Sequence[Sequence[float]] = ((3, 1, 4, 2), (3, 5, 1, 0), (2, 5, 3, 7), (6, 2, 4, 1))
"""What the first function returns for a group, by its prompt. With the second one it is that of the next completion."""
ONE = 0.75
EQUIVALENT = {"applied twice": "the second counts the same rewards"}


def train() -> tiny.TrainingResult:
    if not _trainers():
        return tiny.TrainingResult(absent("no trainer takes reward functions"))
    runs = {name: _Run(name, errs=True) for name in _trainers()}
    outcomes = [judge(float(len(run.errors)), right=float(run.calls), wrong=0.0) for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train where each completion has a reward of both functions."""
    runs = {name: _Run(name, errs=False) for name in _trainers()}
    for name, run in runs.items():
        assert not run.errors, (name, run.errors)
        assert len(run.whole) == STEPS, (name, len(run.whole))
        assert not run.acted, f"the wrapper acts on a reward for each completion: {name}"
    return _result(runs, absent("each completion has its rewards"))


def _trainers() -> list[str]:
    """Return the trainers that take reward functions. RLOO before 0.22 is another trainer, and 0.13 has no GRPO."""
    import trl

    has_rewards = {"GRPO": hasattr(trl, "GRPOTrainer"), "RLOO": hasattr(trl.RLOOTrainer, "_calculate_rewards")}
    return [name for name, takes_functions in has_rewards.items() if takes_functions]


def _result(runs: dict[str, _Run], outcome: Outcome) -> tiny.TrainingResult:
    """Return the losses and the gradients of the steps in which each function returns as many rewards as it should."""
    steps = {
        f"{name} {number}": step
        for name, run in runs.items()
        for number, step in enumerate(run.whole[:1] if run.errs else run.whole)
    }
    gradients = {f"{name} {key}": value for name, step in steps.items() for key, value in step.gradients.items()}
    loss = sum(micro_batch.loss for step in steps.values() for micro_batch in step.micro_batches)
    return tiny.TrainingResult(outcome, loss, gradients)


class _Run:
    """A run of a real trainer, which errs or not. Both what it trains and what it evaluates may end by an error."""

    def __init__(self, name: str, errs: bool) -> None:
        self.name, self.errs = name, errs
        self.errors: list[str] = []
        self.calls = 0
        # Then it does not matter whether the deviation is divided by, as 0.22.0 and 0.22.1 do not.
        self.rewards = [_of_unit_deviation(group) for group in REWARDS]
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            self.trainer = tiny.grpo(
                tiny.stepwise(trainer_class),
                policy,
                config_class,
                LENGTHS,
                reward_funcs=[self._first, self._second],
                gradient_accumulation_steps=MICRO_BATCHES,
                per_device_eval_batch_size=4,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.5,
                beta=0.0,
                num_iterations=1,
                loss_type="bnpo",
                shuffle_dataset=False,
            )
            policy.generate = _answering_several_times(policy.generate)
            self._noting_the_error(self.trainer.train)
            if version("trl") != "0.14.0":  # It cannot evaluate.
                self._noting_the_error(lambda: self.trainer.evaluate(self.trainer.train_dataset.select(range(4))))
        self.whole = [step for step in self.trainer.steps if step.gradients]
        if version("trl") != "0.14.0":  # It has the advantages within its method.
            self._compare()
        counts = [
            tiny.acts(ID, f"{trainer_class.__module__}:{name}Trainer.{method}", self.trainer) for method in METHODS
        ]
        self.acted = any(counts)

    def _noting_the_error(self, run: Callable[[], Any]) -> None:
        self.calls += 1
        try:
            run()
        except ValueError as error:
            if "'_second' returned 1 reward" not in str(error):
                raise
            self.errors.append(str(error))

    def _has_erred(self) -> bool:
        return self.errs and self.trainer.state.global_step > 0

    def _first(self, prompts: list[str], **kwargs: Any) -> list[float]:
        return [self._group(prompt)[row % 4] for row, prompt in enumerate(prompts)]

    def _second(self, prompts: list[str], **kwargs: Any) -> list[float]:
        import torch

        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        if self._has_erred():
            return [ONE]
        groups = [self._group(prompt) for prompt in prompts]
        return [group[(row + 1) % 4] - group[row % 4] for row, group in enumerate(groups)]

    def _group(self, prompt: str) -> Sequence[float]:
        return self.rewards[tiny.PROMPTS.index(prompt) % 4]

    def _compare(self) -> None:
        """Compare the advantages of all micro-batches, and the gradients of each step."""
        import torch

        calls = [(number, call) for number, step in enumerate(self.whole) for call in step.micro_batches]
        calls += [(1, call) for call in self.trainer.evaluations]
        for number, call in calls:
            expected = self._advantages(call.inputs, together=not (self.errs and number))
            assert torch.allclose(call.inputs["advantages"], expected, atol=1e-6), (self.name, number, expected)
        for number, step in enumerate(self.whole):
            differences = [
                step.difference(tiny.expected_gradients(self.policy, step.weights, self._loss_of(number, step, factor)))
                for factor in (1 / MICRO_BATCHES, 1.0)
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            assert min(differences) < 1e-6 * max(1.0, largest), (self.name, number, differences, largest)

    def _advantages(self, batch: dict[str, Any], together: bool) -> Any:
        """Return the advantages of the rows by the formula: of both functions, or of the first one."""
        import torch

        prompts = [self.trainer.processing_class(prompt)["input_ids"] for prompt in tiny.PROMPTS]
        advantages = []
        for prompt, completion in zip(*_rows(batch), strict=True):
            group = self.rewards[prompts.index(prompt) % 4]
            # Of each completion the first token tells which one it is.
            reward = group[((completion[0] - 10) // 7 + together) % 4]
            if self.name == "RLOO":
                advantages.append(reward - (sum(group) - reward) / 3)
            else:
                scale = 1.0 if version("trl") in ("0.22.0", "0.22.1") else statistics.stdev(group) + 1e-4
                advantages.append((reward - statistics.mean(group)) / scale)
        return torch.tensor(advantages)

    def _loss_of(self, number: int, step: tiny.Step, factor: float) -> Callable[[Any], Any]:
        def loss(model: Any) -> Any:
            return (
                sum(self._loss(model, call.inputs, not (self.errs and number)) for call in step.micro_batches) * factor
            )

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], together: bool) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        gains = []
        for prompt, completion, advantage in zip(*_rows(batch), self._advantages(batch, together), strict=True):
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()[None]
            gains.append(advantage * (log_probs - log_probs.detach()).exp())
        if version("trl") < "0.16":  # The mean over sequences.
            return -torch.stack([gain.mean() for gain in gains]).mean()
        return -torch.cat(gains).mean()


METHODS = ("compute_loss", "_prepare_inputs", "_generate_and_score_completions", "_calculate_rewards")


def _answering_several_times(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``generate`` for 0.14.0 too, which leaves it to the model to answer a prompt several times."""

    def generate_several(input_ids: Any, generation_config: Any = None, **kwargs: Any) -> Any:
        times = getattr(generation_config, "num_return_sequences", None) or 1
        return generate(input_ids.repeat_interleave(times, 0))

    return generate_several


def _rows(batch: dict[str, Any]) -> list[list[list[int]]]:
    """Return the prompts and the completions of a batch without their padding."""
    return [
        [row[kept.bool()].tolist() for row, kept in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]


def _of_unit_deviation(rewards: Sequence[float]) -> Sequence[float]:
    # TRL divides by the deviation plus 1e-4.
    unit = (1 - 1e-4) / statistics.stdev(rewards)
    return [reward * unit for reward in rewards]
