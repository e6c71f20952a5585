"""Which bugs a run hits, in numbers: what became of each, and how many it does not hit."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..catalogue import loading
from ..matching import gates
from ..matching.hits import Answer
from ..matching.versions import installed
from ..model import Severity, State
from ..reporting.report import Report
from . import observation, run_hits
from .run import Repair, Word


class Sum(Struct, frozen=True):
    """The bugs that a run hits, by what became of each; those that it may hit; and the number of all others.

    ``idle``: the patch is on, and has not acted. A repair that has acted counts as a hit, whatever the arguments say.
    """

    repaired: tuple[str, ...]
    reported: tuple[str, ...]
    not_repaired: tuple[str, ...]
    idle: tuple[str, ...]
    cannot_tell: tuple[str, ...]
    others: int

    @property
    def hit(self) -> int:
        return len(self.repaired) + len(self.reported) + len(self.not_repaired) + len(self.idle)

    def begins(self, trl: str | None) -> str:
        """Return the line for the beginning of a run that hits nothing."""
        return "; ".join([f"this run hits none of {self._known(trl)}", *self._parts("cannot tell {} more")])

    def ends(self, trl: str | None) -> str:
        """Return the line for the end of a run."""
        if not self.hit:
            return "; ".join([f"this run hit none of {self._known(trl)}", *self._parts("cannot tell {} more")])
        reported = f", reported {len(self.reported)}" if self.reported else ""
        return "; ".join([f"this run: hit {self.hit}, repaired {len(self.repaired)}{reported}", *self._parts()])

    def _known(self, trl: str | None) -> str:
        # Not "the 32 known bugs" where there are more.
        return f"{'' if self.cannot_tell else 'the '}{self.others} known bug{'s'[: self.others != 1]} of TRL {trl}"

    def _parts(self, doubt: str = "cannot tell {}") -> list[str]:
        parts = {"not repaired {}": self.not_repaired, "on and not acted {}": self.idle, doubt: self.cannot_tell}
        return [f"{words.format(len(ids))}: {', '.join(ids)}" for words, ids in parts.items() if ids]

    def fields(self) -> dict[str, Any]:
        """Return what an event has of it."""
        return {
            "hit": self.hit,
            "repaired": list(self.repaired),
            "reported": list(self.reported),
            "not_repaired": list(self.not_repaired),
            "idle": list(self.idle),
            "cannot_tell": list(self.cannot_tell),
            "others": self.others,
        }


def of(trainer: Any, report: Report, all_repairs: Sequence[Repair]) -> Sum:
    """Return the sum of the run of this trainer, as it is now, with its repairs."""
    found = [
        *run_hits.settled(run_hits.of(trainer, report), all_repairs),
        *run_hits.without_repair(trainer, report),
    ]
    observed = [one.id for one in observation.findings(trainer, report) if one.answer is Answer.HIT]
    acted = [repair.status.id for repair in all_repairs if repair.word is Word.REPAIRED]
    hit = dict.fromkeys([*(one.id for one in found if one.answer is Answer.HIT), *observed, *acted])
    doubts = tuple(one.id for one in found if one.id not in hit)
    by_fate: dict[str, list[str]] = {"repaired": [], "reported": [], "not_repaired": [], "idle": []}
    by_id = {repair.status.id: repair for repair in all_repairs}
    for patch_id in hit:
        by_fate[_fate(by_id, patch_id)].append(patch_id)
    fates = {fate: tuple(ids) for fate, ids in by_fate.items()}
    return Sum(**fates, cannot_tell=doubts, others=_others(trainer, report, {*hit, *doubts}))


def _fate(by_id: Mapping[str, Repair], patch_id: str) -> str:
    repair = by_id.get(patch_id)
    if repair is None or repair.word is Word.SELECTED:
        return "not_repaired"
    if repair.word is not Word.REPAIRED:
        return "idle"
    return "reported" if repair.status.patch.severity is Severity.DIAGNOSIS else "repaired"


def _others(trainer: Any, report: Report, named: Iterable[str]) -> int:
    """Return how many known bugs of this TRL the run does not hit."""
    trl, version_of = report.trl or "", functools.cache(installed)
    here = [
        status.patch
        for status in report
        if status.id not in named
        and (status.degraded or status.state is not State.SKIPPED)
        and gates.applicability(status.patch, version_of).state is State.PENDING
        # The trainer was asked about all but those whose module is not imported.
        and (status.state is not State.PENDING or _is_clear(trainer, status.patch, trl))
    ]
    unrepaired = [
        bug
        for bug in loading.without_repair()
        if bug.id not in named
        and gates.has_bug(trl, bug)
        and all(requirement.met for requirement in gates.requirements(bug, version_of))
    ]
    return len(here) + len(unrepaired)


def _is_clear(trainer: Any, patch: Any, trl: str) -> bool:
    return run_hits.judged(trainer, patch, trl).answer is Answer.NOT_HIT
