"""Which of the bugs that are observed does this run hit? Its arguments answer when training begins.

What the witness has seen by then, or by the end of training, tells how often the code of each bug was called.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ..log import log
from ..matching.hits import Answer, finding
from ..model import Patch, Severity, State
from ..reporting.report import Report
from ..witness import every_target
from . import run
from .trainer_arguments import TrainerArguments

_RANK = list(Severity)


class Observed(Struct, frozen=True):
    """A bug that is here, and whether this run hits it.

    ``because`` has the arguments that decide, ``unknown`` what cannot be told. ``called`` has the number of calls of
    each target by this trainer so far. What belongs to no trainer, such as a function, counts for the run
    in which it is called.
    """

    id: str
    severity: Severity
    answer: Answer
    symptom: str
    because: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    called: Mapping[str, int] = {}

    def line(self) -> str:
        """Return the line for the beginning of training."""
        repair = "tells why" if self.severity is Severity.DIAGNOSIS else "repairs it"
        name = f"{self.id} ({self.severity.value})"
        if self.answer is Answer.HIT:
            return f"this run has {name}: {self.symptom}{_listed(self.because)}; TRL_HOTFIX=1 {repair}"
        if self.answer is Answer.CANNOT_TELL:
            doubts = "; ".join(self.unknown)
            return f"this run may have {name}: {self.symptom}; not known here: {doubts}; TRL_HOTFIX=1 {repair}"
        return f"this run does not have {name}"

    def line_at_end(self) -> str:
        """Return the line for the end of training, of a bug whose code was called."""
        calls = ", ".join(f"{_short(target)} {run.times(count)}" for target, count in self.called.items() if count)
        has = {Answer.HIT: "has", Answer.CANNOT_TELL: "may have", Answer.NOT_HIT: "does not have"}[self.answer]
        return f"this run {has} {self.id}: it called {calls}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for the record of the run."""
        return {
            "id": self.id,
            "severity": self.severity.value,
            "answer": self.answer.value,
            "symptom": self.symptom,
            "because": list(self.because),
            "unknown": list(self.unknown),
            "called": dict(self.called),
        }


def findings(trainer: Any, report: Report) -> list[Observed]:
    """Return every bug that ``report`` has as observed, with the answer for ``trainer``: hits and the worst first.

    Where the trainer is not known (None), nothing can be told of its arguments, and the list is empty.
    """
    if trainer is None:
        return []
    name = _name_of(trainer)
    arguments = TrainerArguments(trainer)
    observed = []
    for status in report:
        if status.state is State.OBSERVED:
            found = finding(name, arguments.find, status.patch, report.trl or "")
            called = _called(status.patch, trainer)
            observed.append(
                Observed(
                    status.id,
                    status.patch.severity,
                    found.answer,
                    found.symptom,
                    found.because,
                    found.unknown,
                    called,
                )
            )
    answers = list(Answer)
    return sorted(observed, key=lambda one: (answers.index(one.answer), _RANK.index(one.severity), one.id))


def lines_at_begin(observed: Iterable[Observed]) -> list[tuple[int, str]]:
    """Return the level and the text of each line when training begins: the hits, those in doubt, and how many not."""
    lines, clear = [], 0
    for one in observed:
        if one.answer is Answer.NOT_HIT:
            clear += 1
        else:
            lines.append((logging.WARNING if one.answer is Answer.HIT else logging.INFO, one.line()))
    if clear:
        are = "other bug of this TRL is" if clear == 1 else "other bugs of this TRL are"
        lines.append((logging.INFO, f"{clear} {are} not hit by the arguments of this run"))
    return lines


def lines_at_end(observed: Iterable[Observed]) -> list[tuple[int, str]]:
    """Return the level and the text of each line when training ends: one for each bug whose code was called."""
    return [
        (logging.INFO, one.line_at_end())
        for one in observed
        if any(one.called.values()) and one.answer is not Answer.NOT_HIT
    ]


def log_lines(lines: Iterable[tuple[int, str]]) -> None:
    for level, text in lines:
        log.log(level, "%s", text)


def _name_of(trainer: Any) -> str:
    """Return the name of the trainer's class in TRL, without ``Trainer``."""
    for cls in type(trainer).__mro__:
        if f"{cls.__module__}.".startswith("trl.") and cls.__name__.endswith("Trainer"):
            return cls.__name__.removesuffix("Trainer")
    return ""


def _called(patch: Patch, trainer: Any) -> dict[str, int]:
    counts = dict(every_target())
    keys = [(patch.id, target.name) for target in patch.targets if (patch.id, target.name) in counts]
    return {key[1]: run.calls(trainer, key, counts[key])[0] for key in keys}


def _listed(reasons: Iterable[str]) -> str:
    text = ", ".join(reasons)
    return f" ({text})" if text else ""


def _short(target: str) -> str:
    return target.partition(":")[2]
