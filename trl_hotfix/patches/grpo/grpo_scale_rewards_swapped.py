"""GRPO's ``scale_rewards`` has "group" and "batch" the wrong way round in the conditions that read it.

``_generate_and_score_completions`` of TRL 0.22.0 and 0.22.1 asks for the setting in this order, right after it has
called ``_calculate_rewards``:

    in ["batch", "none"]: take the standard deviation of each group
    == "group":           or else that of the batch
    in ["batch", "none"]: divide the advantages by it

TRL 0.22.2 asks for ``["group", "none"]`` and ``"batch"``, and divides unless it is ``"none"`` (pull request 3992). No
value leads through the old conditions as "none" or "batch" is meant. So from the rewards to its end the method finds a
setting that has another value in each condition. Reward functions find the user's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

from ...authoring import absent, shadowed
from ...model import Outcome, Verdict
from ...testing import judge_with_gradients, scored_completions, stub_grpo_trainer, stub_that_scores

_VALUES = {"group": ("batch", "batch"), "batch": ("group", "group", "batch"), "none": ("none", "group")}
"""What each setting has to be in the conditions that TRL comes to, in their order."""


class _Setting:
    """A setting that has the next of its values in each condition."""

    _value: str

    def __init__(self, values: Sequence[str]) -> None:
        self._values = iter(values)

    def __eq__(self, other: object) -> bool:
        # Each condition asks for "batch" or "group" first.
        if other != "none":
            self._value = next(self._values)
        return self._value == other

    __hash__ = None  # type: ignore[assignment]


def scale_as_asked(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the conditions that follow the rewards do what ``scale_rewards`` says."""
    asked = instance.scale_rewards
    if asked not in _VALUES:
        # TRL has an error for it.
        return wrapped(*args, **kwargs)
    calculate_rewards = instance._calculate_rewards

    def calculate_and_set(*args: Any, **kwargs: Any) -> Any:
        rewards = calculate_rewards(*args, **kwargs)
        instance.scale_rewards = _Setting(_VALUES[asked])
        return rewards

    # The first one restores what is set after the rewards.
    with shadowed(instance, "scale_rewards", asked), shadowed(instance, "_calculate_rewards", calculate_and_set):
        return wrapped(*args, **kwargs)


def advantages_are_scaled_as_asked(module: ModuleType) -> Outcome:
    """Score two generations and an evaluation with each setting, and judge their losses with the gradients.

    The metrics and the logged advantages must fit, and nothing is left on the trainer. An unknown setting is an error.
    """
    field = module.GRPOConfig.__dataclass_fields__.get("scale_rewards")
    if field is None or field.default != "group":
        return absent("this release has no choice between the deviation of a group and that of the batch")
    outcomes = [outcome for setting in _VALUES for outcome in _outcomes(module, setting)]
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some advantages are scaled as asked, and others are not: {outcomes}")
    _check_that_an_unknown_setting_is_an_error(module)
    return outcomes[0]


_GROUP = 3
_COMPLETIONS = ((5, 1), (10, 3, 4, 6, 1), (8, 9, 1), (1,), (7, 4, 9, 11, 3, 1), (3, 10, 4, 1))
"""Without 2, which ends a sequence by the configuration of the model."""
_GENERATIONS = (
    (True, (0.0, 1.0, 5.0, 10.0, 0.0, 40.0)),
    (True, (7.0, 30.0, 2.0, 1.5, 1.0, 2.0)),
    (False, (2.0, 2.0, 2.0, 20.0, 10.0, 0.0)),
)
"""Whether it is for training, and the rewards of two groups. In the last one a group has no deviation."""

_INSTEAD = {"group": "none", "batch": "group", "none": "group"}
"""How the advantages are scaled instead."""

_MEASURED = {"group": "group", "batch": "batch", "none": "group"}
_MEASURED_INSTEAD = {"group": "batch", "batch": "group", "none": "group"}
"""Of what the deviation is that is logged, for each setting."""


def _deviations(rewards: Sequence[float], of: str) -> list[float]:
    """Return the standard deviation of the group, or of the batch, of each reward."""
    if of == "batch":
        return [statistics.stdev(rewards)] * len(rewards)
    groups = [rewards[start : start + _GROUP] for start in range(0, len(rewards), _GROUP)]
    return [statistics.stdev(group) for group in groups for _ in group]


def _advantages(rewards: Sequence[float], scale: str) -> list[float]:
    """Return the rewards without the mean of their group (DeepSeekMath, arXiv:2402.03300), scaled."""
    means = [statistics.mean(rewards[row - row % _GROUP :][:_GROUP]) for row in range(len(rewards))]
    centred = [reward - mean for reward, mean in zip(rewards, means, strict=True)]
    if scale == "none":
        return centred
    # TRL adds 1e-4 to the deviation.
    return [value / (of + 1e-4) for value, of in zip(centred, _deviations(rewards, scale), strict=True)]


def _outcomes(module: ModuleType, setting: str) -> Iterator[Outcome]:
    """Judge the losses of one trainer."""
    import torch

    rewards: list[float] = []

    def rate(**kwargs: Any) -> list[float]:
        if trainer.scale_rewards is not setting:
            raise AssertionError(f"a reward function finds {trainer.scale_rewards!r}, not {setting!r}")
        return rewards

    mask = torch.zeros(len(_COMPLETIONS), max(map(len, _COMPLETIONS)))
    for row, completion in enumerate(_COMPLETIONS):
        mask[row, : len(completion)] = 1
    log_probs = torch.full_like(mask, -0.5, requires_grad=True)
    settings: dict[str, Any] = {"scale_rewards": setting, "num_generations": _GROUP, "num_generations_eval": _GROUP}
    settings |= {"loss_type": "bnpo", "beta": 0.0}
    trainer = stub_that_scores(module, _COMPLETIONS, [0.0] * len(_COMPLETIONS), **settings)
    trainer.reward_funcs = [rate]
    # The constructor has it from the arguments.
    trainer.scale_rewards = setting

    def loss_of(advantages: Sequence[float]) -> Any:
        # The ratio of the probabilities is 1; its gradient is that of the log-probs.
        ratio = torch.exp(log_probs - log_probs.detach())
        return -(torch.tensor(advantages).unsqueeze(1) * ratio * mask).sum() / mask.sum()

    for number, (training, rewards[:]) in enumerate(_GENERATIONS):
        trainer.model.train(training)
        trainer.state.global_step = number
        output = scored_completions(trainer)
        if vars(trainer)["scale_rewards"] is not setting or "_calculate_rewards" in vars(trainer):
            raise AssertionError(f"the trainer is not as before: {vars(trainer)}")
        measured = stub_grpo_trainer(module, log_probs, training=training, **settings)._compute_loss(None, output)
        scales = setting, _INSTEAD[setting]
        right, wrong = (loss_of(_advantages(rewards, scale)) for scale in scales)
        outcome = judge_with_gradients([log_probs], [(measured, right, wrong)])
        is_fixed = outcome.verdict is Verdict.FIXED
        _check_what_is_logged(
            module, trainer, rewards, scales[not is_fixed], (_MEASURED if is_fixed else _MEASURED_INSTEAD)[setting]
        )
        yield outcome


def _check_what_is_logged(module: ModuleType, trainer: Any, rewards: Sequence[float], scale: str, of: str) -> None:
    """Check the newest metrics and advantages in the log."""
    deviations = _deviations(rewards, of)
    # From 0.27.0 on reward_std is that of the batch, whatever the setting.
    shown = (
        _deviations(rewards, "batch")
        if "multi_objective_aggregation" in module.GRPOConfig.__dataclass_fields__
        else deviations
    )
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    logged = [
        metrics["reward_std"][-1],
        metrics["frac_reward_zero_std"][-1],
        *trainer._logs["advantages"][-len(rewards) :],
    ]
    zeros = statistics.mean(float(deviation == 0) for deviation in deviations)
    expected = [statistics.mean(shown), zeros, *_advantages(rewards, scale)]
    if not all(math.isclose(*pair, rel_tol=1e-5, abs_tol=1e-6) for pair in zip(logged, expected, strict=True)):
        raise AssertionError(
            f"deviation, share of groups without one, and advantages in the log: {logged}, not {expected}"
        )


def _check_that_an_unknown_setting_is_an_error(module: ModuleType) -> None:
    trainer = stub_that_scores(module, [[5, 1], [6, 1]], [0.0, 1.0], scale_rewards="batches", beta=0.0)
    try:
        scored_completions(trainer)
    except ValueError as error:
        if "Invalid value for scale_rewards: batches." in str(error):
            return
        raise
    raise AssertionError("an unknown setting is no error")
