"""What the witness saw of a run: a word and the counts for each patch, as a record and as lines of the log.

==============  ========================================================================================
``repaired``    the wrapper acted in calls of this trainer
``called``      this trainer called it, and it had nothing to do
``standing by`` it is on this trainer's class, and has not been called yet
``selected``    it is on, or goes on at its import, for other trainers than this one
==============  ========================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Protocol

from msgspec import Struct

from ..errors import printable
from ..model import Called, State
from ..patching import engine, reach
from ..reporting.report import PatchStatus, Report
from ..selection.freeze_files import SCHEMA
from ..witness import Counts, every_target

LONGEST_PROBLEM, MOST_PROBLEMS = 500, 30
"""A record is read back by its size, so the text of errors, and the ranks that differ, must not fill it."""


class Observed(Protocol):
    """What an observation says of one bug, for the record."""

    def to_dict(self) -> dict[str, Any]: ...


class Word(str, Enum):
    """What a patch was to a run."""

    REPAIRED = "repaired"
    CALLED = "called"
    STANDING_BY = "standing by"
    SELECTED = "selected"


class Repair(Struct, frozen=True):
    """A patch in a run, with the calls of its targets by the trainer, and those in which its wrappers acted."""

    status: PatchStatus
    word: Word
    called: int
    acted: int

    @property
    def name(self) -> str:
        return f"{self.status.id} (r{self.status.patch.revision})"

    def to_dict(self) -> dict[str, Any]:
        counts = {"called": self.called, "acted": self.acted}
        return {**self.status.frozen(), "word": self.word.value, **counts}

    def line(self) -> str:
        """Return what became of the patch in this run, in one line."""
        if self.word is Word.REPAIRED:
            return f"{self.name} acted in {self.acted} of {self.called} calls"
        if self.word is Word.CALLED:
            return f"{self.name} was called {times(self.called)}, with nothing to do"
        moments = dict.fromkeys(_NEVER[target.called] for target in self.status.patch.targets)
        return f"{self.name} was not called: {', '.join(moments)}"


_NEVER = {
    None: "the run did not need it",
    Called.CONSTRUCTION: "the run did not need it",
    Called.SOME_CONSTRUCTIONS: "the run's arguments do not need it",
    Called.PREPARATION: "no data were prepared in this process",
    Called.DATA: "no batch was made in this process",
    Called.STEP: "no step called it",
    Called.SOME_STEPS: "the run's arguments do not need it",
    Called.EVALUATION: "evaluation never ran",
    Called.GENERATION: "nothing was generated",
    Called.SAVE: "nothing was saved",
    Called.RESUME: "the run was not resumed",
    Called.IMPORT: "the run did not need it",
}


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


_before: dict[tuple[str, str], tuple[int, int]] = {}
"""The calls of functions, and of objects that are not trainers, by the end of the last run in this process."""


def run_ends() -> None:
    """Count the calls of functions from now on for the next trainer of this process."""
    _before.update({key: (counts.process.called, counts.process.acted) for key, counts in every_target()})


def repairs(trainer: Any, report: Report) -> tuple[Repair, ...]:
    """Return each patch that is on or goes on at its import, and each reverted one that this trainer has called."""
    counts = _counts(trainer)
    concerned = reach.concerning(engine.ENGINE.module_patches(), trainer)
    # A constructor that overrides TRL's, and calls it, is concerned too.
    concerned |= {key[0] for key, counts_of_target in every_target() if counts_of_target.known(trainer) is not None}
    found, on = [], {status.id for status in report.on()}
    for status in report:
        called, acted = counts.get(status.id, (0, 0))
        # What a trainer was made with stays in its run, also after `revert()`.
        made_with_it = status.state is State.REVERTED and acted > 0 and _is_early(status)
        if status.id not in on and not made_with_it:
            continue
        word = Word.STANDING_BY if status.id in concerned else Word.SELECTED
        if status.id in concerned:
            word = Word.REPAIRED if acted else Word.CALLED if called else word
        else:
            called = acted = 0
        found.append(Repair(status, word, called, acted))
    return tuple(found)


def calls(trainer: Any, key: tuple[str, str], counts: Counts) -> tuple[int, int]:
    """Return the calls and the acts of a target: those of this trainer, and those without one since the last run."""
    own, (called, acted) = counts.known(trainer), _before.get(key, (0, 0))
    called, acted = counts.process.called - called, counts.process.acted - acted
    return (called, acted) if own is None else (called + own.called, acted + own.acted)


def _is_early(status: PatchStatus) -> bool:
    return all(target.called in reach.BEFORE_TRAINING for target in status.patch.targets)


def _counts(trainer: Any) -> Mapping[str, tuple[int, int]]:
    """Return the calls and the acts by patch: those of this trainer, and those without a trainer since the last run."""
    sums: dict[str, tuple[int, int]] = {}
    for key, counts in every_target():
        called, acted = calls(trainer, key, counts)
        before = sums.get(key[0], (0, 0))
        sums[key[0]] = before[0] + called, before[1] + acted
    return sums


def record(
    trainer: Any,
    report: Report,
    observed: Iterable[Observed] = (),
    hits: Iterable[Mapping[str, Any]] | None = None,
    problems: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the record of a run. As a file it can be given to ``TRL_HOTFIX_ONLY=@file``.

    ``patches`` are those that are on or go on at their import, each with its word and its counts. Apart from them are
    those that did not reach this trainer, those that were taken off before it ended, and those that were only observed.
    ``hits`` are the bugs that the run's arguments hit, or of which that cannot be told, and None if nobody asked, which
    is not the same as none; ``problems`` are the warnings.
    """
    all_repairs = repairs(trainer, report)
    entries = [repair.to_dict() for repair in all_repairs if repair.status.state is not State.REVERTED]
    off = [repair.to_dict() for repair in all_repairs if repair.status.state is State.REVERTED]
    unreached = [
        {**status.frozen(), "reason": status.reason.value} for status in report if status.state is State.UNREACHED
    ]
    lists: dict[str, list[Any]] = {
        "unreached": unreached,
        "reverted": off,
        "observed": [one.to_dict() for one in observed],
        "hits": [dict(hit) for hit in hits or ()],
        "problems": [printable(problem, LONGEST_PROBLEM) for problem in list(problems)[:MOST_PROBLEMS]],
    }
    asked = {"hits"} if hits is not None else set()
    kept = {name: entries for name, entries in lists.items() if entries or name in asked}
    return {"schema": SCHEMA, **report.freeze(), "patches": entries, **kept}


def summary(all_repairs: Iterable[Repair]) -> str:
    """Return the patches of this trainer by their words, and the number of those for other trainers, in one line."""
    by_word: dict[Word, list[str]] = {}
    for repair in all_repairs:
        by_word.setdefault(repair.word, []).append(repair.name)
    others = len(by_word.pop(Word.SELECTED, ()))
    parts = [f"{word.value}: {', '.join(by_word[word])}" for word in Word if word in by_word] or [
        "none for this trainer"
    ]
    if others:
        parts.append(f"{others} more for other trainers")
    return "; ".join(parts)
