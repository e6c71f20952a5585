"""The configuration of an engine. It is replaced as one object, and put back as one object when a call fails."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ..errors import NotAppliedError
from ..model import Decision, State, Strict
from ..selection.selection import Selection


class Configuration(Struct, frozen=True):
    """The selection and its policy. ``decisions`` has what the gates decided, by patch.

    Without a ``selection``, ``apply()`` has not been called yet. With ``observe`` we repair nothing, and observe the
    patches that would go on.
    """

    selection: Selection | None = None
    decisions: Mapping[str, Decision] = {}
    strict: Strict = Strict.NOTHING
    """What raises here and at the imports that follow."""
    of_runs: Strict = Strict.NOTHING
    """What ends a run. ``patched()`` leaves it as it was."""
    given: frozenset[str] = frozenset()
    """Which of ``only``, ``skip`` and ``strict`` were arguments: their variables do nothing."""
    try_unknown_body: bool = False
    observe: bool = False
    measure_effect: bool = False

    @property
    def skipped(self) -> frozenset[str] | None:
        """The ids that the user leaves out; None beside a freeze file, which decides alone."""
        if self.selection is None:
            return frozenset()
        return self.selection.skip if self.selection.frozen is None else None

    @property
    def selected(self) -> set[str]:
        """The ids of the patches that go on when their modules are imported."""
        return {patch_id for patch_id, decision in self.decisions.items() if decision.state is State.PENDING}


def not_applied(reasons: Iterable[str]) -> NotAppliedError:
    """Return the error of strict mode, with a line for each patch that should be on and cannot be."""
    lines = "".join(f"\n  {reason}" for reason in reasons)
    return NotAppliedError(f"strict mode: a patch that should be on cannot be:{lines}")
