"""Train two optimizer steps of two micro-batches with the real GRPOTrainer, and evaluate, with each ``scale_rewards``.

A batch has groups of two completions. The rewards of one group differ by more than those of the next, and each
generation has others. Losses, accumulated gradients and metrics are compared with advantages that are computed here.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent, judge, shadowed
from trl_hotfix.model import Verdict

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = True
EQUIVALENT = {"applied twice": "the setting of the second wrapper takes the place of the first one's, and is equal"}

LENGTHS = (2, 4, 8, 6)
"""The tokens of the four completions of two groups."""

REWARDS = ((0.0, 1.0, 0.0, 10.0), (5.0, 3.0, 1.0, 1.5), (2.0, 8.0, 1.0, 0.0))
"""The rewards of two groups, in the generation of each step and in that of the evaluation."""

SCALES: Mapping[Any, str] = {"group": "group", "batch": "batch", "none": "none", True: "group", False: "none"}
"""How each setting is to scale the advantages: by the deviation of this, or by none."""

SCALES_INSTEAD = {"group": "none", "batch": "group", "none": "group"}
DEVIATIONS = {"group": "group", "batch": "batch", "none": "group"}
DEVIATIONS_INSTEAD = {"group": "batch", "batch": "group", "none": "group"}
"""Of what the logged deviation is, for each scale."""


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    field = GRPOConfig.__dataclass_fields__.get("scale_rewards")
    if field is None or field.default != "group":
        return tiny.TrainingResult(absent("this release has no choice between a group's deviation and the batch's"))
    runs = {str(setting): _run(SCALES[setting], scale_rewards=setting) for setting in SCALES}
    outcomes = {name: grpo_steps.judged_steps(run) for name, run in runs.items()}
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"some settings scale as they say, and others do not: {outcomes}")
    for (name, run), scale in zip(runs.items(), SCALES.values(), strict=True):
        is_fixed = outcomes[name].verdict is Verdict.FIXED
        _check_the_log(run, DEVIATIONS[scale] if is_fixed else DEVIATIONS_INSTEAD[scale])
    return grpo_steps.several_runs(runs, outcomes["group"])


def unaffected() -> tiny.TrainingResult:
    """Train with equal rewards, which have no deviation, and stop at a setting that TRL does not know."""

    def equal(completions: list[str], **kwargs: Any) -> list[float]:
        return [1.0] * len(completions)

    runs = {
        setting: _run(setting, scale_rewards=setting, reward_funcs=equal, beta=0.5)
        for setting in ("group", "batch", "none")
    }
    try:
        _run("none", scale_rewards="batches")
    except ValueError as error:
        if "Invalid value for scale_rewards: batches." not in str(error):
            raise
    else:
        raise AssertionError("an unknown setting is no error")
    return grpo_steps.several_runs(runs, absent("all advantages are 0"))


def _run(scale: str, **settings: Any) -> tiny.FormulaSteps:
    generations = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        import torch

        # The trainer shuffles the batch after it has the rewards.
        torch.manual_seed(0)
        rewards = REWARDS[len(generations)]
        generations.append(rewards)
        return [rewards[row % len(rewards)] for row in range(len(completions))]

    def formula(trainer: Any, inputs: Mapping[str, Any], token_loss: Any, mask: Any) -> dict[str, Any]:
        if trainer.beta:
            return {"loss": (token_loss * mask).sum() / mask.sum()}
        # A generation is that of an optimizer step, two micro-batches. An evaluation accumulates nothing.
        batches, rewards = (2, REWARDS[trainer.state.global_step]) if trainer.model.training else (1, REWARDS[2])
        rows = [LENGTHS.index(int(length)) for length in mask.sum(1)]

        def loss(scale: str) -> Any:
            expected = _advantages(rewards * batches, scale)
            weights = inputs["advantages"].new_tensor([expected[row] for row in rows]) / inputs["advantages"]
            # The loss of a token is proportional to its advantage.
            return (weights.unsqueeze(1) * token_loss * mask).sum() / (batches * sum(LENGTHS))

        return {"right": loss(scale), "wrong": loss(SCALES_INSTEAD[scale])}

    make = grpo_steps.grpo
    trainers = []

    def grpo(*args: Any, **kwargs: Any) -> Any:
        trainers.append(make(*args, **kwargs))
        return trainers[-1]

    defaults = {"loss_type": "dapo", "beta": 0.0, "num_generations": 2, "reward_funcs": reward}
    with shadowed(grpo_steps, "grpo", grpo):
        run = grpo_steps.grpo_steps(formula, moved=0.1, **{**defaults, **settings})
    (run.trainer,) = trainers
    return run


def _advantages(rewards: tuple[float, ...], scale: str) -> list[float]:
    """Return the rewards without the mean of their group of two (DeepSeekMath, arXiv:2402.03300), scaled."""
    means = [statistics.mean(rewards[row - row % 2 :][:2]) for row in range(len(rewards))]
    # TRL adds 1e-4 to the deviation.
    divisors = [1.0] * len(rewards) if scale == "none" else [of + 1e-4 for of in _deviations(rewards, scale)]
    return [(reward - mean) / by for reward, mean, by in zip(rewards, means, divisors, strict=True)]


def _deviations(rewards: tuple[float, ...], of: str) -> list[float]:
    """Return the standard deviation of the group, or of the batch, of each reward."""
    if of == "batch":
        return [statistics.stdev(rewards)] * len(rewards)
    return [statistics.stdev(rewards[row - row % 2 :][:2]) for row in range(len(rewards))]


def _check_the_log(run: tiny.FormulaSteps, of: str) -> None:
    """Check ``reward_std`` of the two steps and of the evaluation."""
    from trl import GRPOConfig

    if "multi_objective_aggregation" in GRPOConfig.__dataclass_fields__:
        # From 0.27.0 on it is that of the batch, whatever the setting.
        of = "batch"
    history = run.trainer.state.log_history
    logged = [entry[name] for name in ("reward_std", "eval_reward_std") for entry in history if name in entry]
    for value, rewards, batches in zip(logged, REWARDS, (2, 2, 1), strict=True):
        judge(value, right=statistics.mean(_deviations(rewards * batches, of)), wrong=-1.0)
