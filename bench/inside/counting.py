"""Count in which calls the wrappers of patches act, also after their trainers are gone."""

from __future__ import annotations

from typing import ClassVar

from trl_hotfix import witness
from trl_hotfix.model import Patch, Target


class Kept(witness.Ledger):
    """A ledger that is kept when its trainer is gone."""

    kept: ClassVar[list[witness.Ledger]] = [witness.PROCESS]

    def __init__(self, key: int = 0) -> None:
        super().__init__(key)
        self.kept.append(self)


def keep_ledgers() -> None:
    """Keep each ledger from now on."""
    witness.Ledger = Kept  # type: ignore[misc]


def total(patch: Patch, target: Target) -> tuple[int, int]:
    """Return the calls of a target since then, and in how many of them the wrapper acted."""
    counts = [ledger.total(patch.id, target.name) for ledger in Kept.kept]
    return sum(count.called for count in counts), sum(count.acted for count in counts)
