"""Train two optimizer steps of two micro-batches with the real GRPO and RLOO, on completions without a reward.

Two reward functions return None for some of them, and in each group both do for one or two. The advantages of every
micro-batch, also those of the evaluation, are compared with the formulas (arXiv:2402.03300, section 4.1.2, and
arXiv:2402.14740, section 3), and the accumulated gradients with those of the losses on such advantages, which are
computed without TRL.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = ">=0.22.0,!=0.26.0,!=0.26.1,!=0.26.2"
"""Earlier releases leave the division by the micro-batches to transformers, of which some do not divide.

RLOO of 0.26 trains on a part of each generation alone (rloo-step-counted-twice).
"""

ID = "grpo-none-reward-counts-as-zero"
STEPS, MICRO_BATCHES = 2, 2
LENGTHS = (2, 4, 8, 6)

_Rewards = Sequence[float | None]

SOME_UNJUDGED: Sequence[_Rewards] = ((None, 1, 4, 2), (3, None, None, 0), (2, 5, None, 7), (None, None, 4, 1))
ALL_JUDGED: Sequence[_Rewards] = ((3, 1, 4, 2), (3, 5, 1, 0), (2, 5, 3, 7), (6, 2, 4, 1))
"""The rewards of a group, by its prompt."""
EQUIVALENT = {"applied twice": "statistics that leave out NaN do so again"}


def train() -> tiny.TrainingResult:
    try:
        runs = {name: _Run(name, SOME_UNJUDGED) for name in _scoring()}
    except TypeError as error:
        if "not subscriptable" not in str(error):
            raise
        return tiny.TrainingResult(absent("the warning about a completion without a reward crashes"))
    if not runs:
        return tiny.TrainingResult(absent("this release takes no None"))
    outcomes = [run.judged() for run in runs.values()]
    if {outcome.verdict for outcome in outcomes} != {outcomes[0].verdict}:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    return _result(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train where each completion has the reward of a function at least, and the other function returns None."""
    runs = {name: _Run(name, ALL_JUDGED) for name in _scoring()}
    for name, run in runs.items():
        run.judged()
        assert not run.acted, f"the wrapper acts on complete rewards: {name}"
    return _result(runs, absent("each completion has a reward"))


def _result(runs: dict[str, _Run], outcome: Outcome) -> tiny.TrainingResult:
    """Return the losses of the steps, added up. An evaluation divides by the micro-batches up to 0.27.0."""
    result = tiny.result_of_runs(runs, outcome)
    steps = [step for run in runs.values() for step in run.steps]
    result.loss = sum(micro_batch.loss for step in steps for micro_batch in step.micro_batches)
    return result


def _scoring() -> list[str]:
    """Return the trainers that score completions in a method of their own."""
    import trl

    method = "_generate_and_score_completions"
    return [name for name in ("GRPO", "RLOO") if hasattr(getattr(trl, f"{name}Trainer", None), method)]


class _Run:
    """A run of a real trainer whose groups have these rewards, by prompt."""

    def __init__(self, name: str, rewards: Sequence[_Rewards]) -> None:
        self.name = name
        # Then it does not matter whether the deviation of what is judged is divided by, as 0.22.0 and 0.22.1 do not.
        self.rewards = [_of_unit_deviation(group) for group in rewards]
        trainer_class, config_class = tiny.classes(name)
        with tempfile.TemporaryDirectory() as folder:
            policy, self.policy = (tiny.llama(folder, seed=0) for _ in range(2))
            trainer = tiny.grpo(
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
            self.tokenizer = trainer.processing_class
            trainer.train()
            trainer.evaluate(trainer.train_dataset.select(range(4)))
        self.steps, self.evaluations = trainer.steps, trainer.evaluations
        target = f"{trainer_class.__module__}:{trainer_class.__name__}._generate_and_score_completions"
        self.acted = tiny.acts(ID, target, trainer)

    def _first(self, prompts: list[str], **kwargs: Any) -> _Rewards:
        return [part for part, _ in self._parts(prompts)]

    def _second(self, prompts: list[str], **kwargs: Any) -> _Rewards:
        import torch

        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        return [part for _, part in self._parts(prompts)]

    def _parts(self, prompts: list[str]) -> list[tuple[float | None, float | None]]:
        """Return what the two functions give for each completion: one of them, the other, both or none."""
        parts: list[tuple[float | None, float | None]] = []
        for row, prompt in enumerate(prompts):
            reward = self.rewards[tiny.PROMPTS.index(prompt) % 4][row % 4]
            if reward is None or row % 3 == 0:
                parts.append((reward, None))
            else:
                parts.append((None, reward) if row % 3 == 1 else (reward - 0.5, 0.5))
        return parts

    def judged(self) -> Outcome:
        """Judge the advantages of all micro-batches, and the gradients of each step."""
        batches = [micro_batch.inputs for step in self.steps for micro_batch in step.micro_batches]
        batches += [evaluation.inputs for evaluation in self.evaluations]
        outcomes = [self._judged_advantages(batch) for batch in batches]
        if len({outcome.verdict for outcome in outcomes}) != 1:
            raise AssertionError(f"{self.name}: the micro-batches are not of one kind: {outcomes}")
        of_unjudged = None if outcomes[0].verdict is Verdict.FIXED else 0.0
        for number, step in enumerate(self.steps):
            differences = [
                step.difference(
                    tiny.expected_gradients(self.policy, step.weights, self._loss_of(step, of_unjudged, factor))
                )
                for factor in self._factors()
            ]
            largest = max(float(value.abs().max()) for value in step.gradients.values())
            if min(differences) > 1e-6 * max(1.0, largest) or largest == 0.0:
                raise AssertionError(f"{self.name}, step {number}: the gradients differ by {differences} of {largest}")
        shapes = [len(step.micro_batches) for step in self.steps], len(self.evaluations)
        if shapes != ([MICRO_BATCHES] * STEPS, 4):
            raise AssertionError(f"micro-batches of the steps and the evaluation: {shapes}")
        return outcomes[0]

    def _factors(self) -> list[float]:
        """Return by what the sum over the micro-batches may be multiplied."""
        from packaging.version import Version

        # ``trl.__version__`` is "unknown" in 0.22.0.
        old = Version(version("trl")) < Version("0.22")
        return [1 / MICRO_BATCHES, 1.0] if old else [1 / MICRO_BATCHES]

    def _judged_advantages(self, batch: dict[str, Any]) -> Outcome:
        import torch

        measured = batch["advantages"]
        right, wrong = (self._advantages(batch, reward) for reward in (None, 0.0))
        if not any(torch.allclose(measured, kind, rtol=1e-5, atol=1e-6) for kind in (right, wrong)):
            raise AssertionError(f"{self.name}: the advantages {measured} are neither {right} nor {wrong}")
        weights = torch.cos(torch.arange(float(len(measured))))
        numbers = [float((weights * kind).sum()) for kind in (measured, right, wrong)]
        return judge(numbers[0], right=numbers[1], wrong=numbers[2])

    def _advantages(self, batch: dict[str, Any], of_unjudged: float | None) -> Any:
        """Return the advantages of the rows by the formula, with this reward of what is not judged."""
        import torch

        prompts = [self.tokenizer(prompt)["input_ids"] for prompt in tiny.PROMPTS]
        advantages = []
        for prompt, completion in zip(*_rows(batch), strict=True):
            rewards = [of_unjudged if reward is None else reward for reward in self.rewards[prompts.index(prompt) % 4]]
            # Of each completion the first token tells which one it is.
            row = (completion[0] - 10) // 7
            advantages.append(self._advantage(rewards, row))
        return torch.tensor(advantages)

    def _advantage(self, rewards: _Rewards, row: int) -> float:
        reward, judged = rewards[row], [reward for reward in rewards if reward is not None]
        if reward is None:
            return 0.0
        if self.name == "RLOO":
            return reward - (sum(judged) - reward) / (len(judged) - 1)
        # These scale if they should not, and do not if they should (TRL pull request 3992).
        scale = 1.0 if version("trl") in ("0.22.0", "0.22.1") else statistics.stdev(judged) + 1e-4
        return (reward - statistics.mean(judged)) / scale

    def _loss_of(self, step: tiny.Step, of_unjudged: float | None, factor: float) -> Any:
        def loss(model: Any) -> Any:
            losses = [self._loss(model, micro_batch.inputs, of_unjudged) for micro_batch in step.micro_batches]
            return sum(losses) * factor

        return loss

    def _loss(self, model: Any, batch: dict[str, Any], of_unjudged: float | None) -> Any:
        """Return the loss of a micro-batch, a row at a time and so without padding."""
        import torch

        gains = []
        for prompt, completion, advantage in zip(*_rows(batch), self._advantages(batch, of_unjudged), strict=True):
            log_probs = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            log_probs = log_probs.log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
            if self.name == "RLOO":  # The ratio is that of whole completions.
                log_probs = log_probs.sum()[None]
            gains.append(advantage * (log_probs - log_probs.detach()).exp())
        return -torch.cat(gains).mean()


def _rows(batch: dict[str, Any]) -> list[list[list[int]]]:
    """Return the prompts and the completions of a batch without their padding."""
    return [
        [row[kept.bool()].tolist() for row, kept in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]


def _of_unit_deviation(rewards: _Rewards) -> _Rewards:
    # TRL divides by the deviation plus 1e-4.
    unit = (1 - 1e-4) / statistics.stdev([reward for reward in rewards if reward is not None])
    return [None if reward is None else reward * unit for reward in rewards]
