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

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import scored_completions, stub_that_scores, tiny_causal_lm

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


@wrapper
def scale_as_asked(call: Call) -> Any:
    """Let the conditions that follow the rewards do what ``scale_rewards`` says."""
    trainer = call.trainer
    asked = trainer.scale_rewards
    if asked not in _VALUES:
        # TRL has an error for it.
        return call()
    calculate_rewards = trainer._calculate_rewards

    def calculate_and_set(*args: Any, **kwargs: Any) -> Any:
        rewards = calculate_rewards(*args, **kwargs)
        trainer.scale_rewards = _Setting(_VALUES[asked])
        return rewards

    # The first one restores what is set after the rewards.
    with shadowed(trainer, "scale_rewards", asked), shadowed(trainer, "_calculate_rewards", calculate_and_set):
        return call()


def advantages_are_scaled_as_asked(module: ModuleType) -> Outcome:
    """Score two groups by "group", and judge an advantage. It is 1 without the deviation of its group, which is 2**0.5.

    TRL adds 1e-4 to the deviation.
    """
    field = module.GRPOConfig.__dataclass_fields__.get("scale_rewards")
    if field is None or field.default != "group":
        return absent("this release has no choice between the deviation of a group and that of the batch")
    model, rewards = tiny_causal_lm(vocabulary=16), (0.0, 2.0, 0.0, 20.0)
    pairs: dict[str, Any] = {"num_generations": 2, "num_generations_eval": 2, "beta": 0.0, "scale_rewards": "group"}
    trainer = stub_that_scores(module, [[5, 1]] * 4, rewards, model=model, reference=model, **pairs)
    advantages = scored_completions(trainer)["advantages"].tolist()
    return judge(advantages[1], right=1 / (2**0.5 + 1e-4), wrong=1.0)
