"""A patch in one module of TRL."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from msgspec import Struct

from ..model import Decision, Options, Patch, Reason, State, Target
from ..reporting.sentences import in_one_line
from .breaker import Breaker

if TYPE_CHECKING:
    from .compiled_code import Compiled
    from .sites import Site


class ModulePatch(Struct, eq=False):
    """A patch in one module: its targets, the current decision, and all earlier ones in ``journal``.

    ``before_reload`` are the sites of classes that a reload has replaced, and that may still have trainers. With
    ``observe`` its layers only count.
    """

    patch: Patch
    module: str
    targets: tuple[Target, ...]
    breaker: Breaker
    options: Options = {}
    observe: bool = False
    decision: Decision = Decision(State.PENDING, Reason.NOT_IMPORTED)
    sites: list[Site] = []
    cancel_requested: bool = False
    compiled: Compiled = ()
    before_reload: list[weakref.ref[Site]] = []
    journal: list[str] = []

    @property
    def key(self) -> tuple[str, str]:
        return self.patch.id, self.module

    def replaced_sites(self) -> list[Site]:
        """Return the sites of the classes before a reload that still exist."""
        self.before_reload = [reference for reference in self.before_reload if reference() is not None]
        return [site for reference in self.before_reload if (site := reference()) is not None]

    def every_site(self) -> list[Site]:
        return [*self.sites, *self.replaced_sites()]

    def note(self) -> None:
        """Add the current decision to the journal."""
        state = f"{self.decision.state.value} ({self.decision.reason.value})"
        self.journal.append(f"{self.patch.id}: {self.module}: {state}{in_one_line(self.decision)}")
