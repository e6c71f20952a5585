"""Where each training began. Later the state of the trainer does not show whether the run resumed."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from ..by_identity import ByIdentity
from ..catalogue.conditions import Argument, Kind

NOT_SEEN = Argument(Kind.UNKNOWN, reason="the beginning of training was not seen")


class Beginning(Struct, frozen=True):
    """The step and the epoch of the state when training began: not 0 if the run was resumed."""

    step: int
    epoch: float


_beginnings: ByIdentity[Beginning] = ByIdentity()


def note(trainer: Any, state: Any) -> None:
    """Note where a training begins. transformers has loaded the state of the checkpoint by then."""
    _beginnings[trainer] = Beginning(int(state.global_step), float(state.epoch or 0))


def of(trainer: Any) -> Beginning | None:
    """Return where the latest training of this trainer began, or None if no beginning was seen."""
    return _beginnings.get(trainer)
