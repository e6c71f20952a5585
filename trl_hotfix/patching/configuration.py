"""What an engine was asked for, whole: it is replaced at once, and put back at once where a call fails."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from ..model import Decision, State
from ..selection.selection import Selection


class Configuration(Struct, frozen=True):
    """``decisions`` are those of the gates, by patch. Without a ``selection`` nothing has been asked for yet."""

    selection: Selection | None = None
    decisions: Mapping[str, Decision] = {}
    strict: bool = False
    try_unknown_body: bool = False

    @property
    def wanted(self) -> set[str]:
        """The ids of the patches that go on when their modules are imported."""
        return {patch_id for patch_id, decision in self.decisions.items() if decision.state is State.PENDING}
