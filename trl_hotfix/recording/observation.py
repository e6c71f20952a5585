"""Which of the bugs that are observed does this run hit? Its arguments answer when training begins.

The witness counts, until then and until the end of training, how often the code of each bug was called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ..log import event, log, warning
from ..matching.hits import Answer
from ..model import Severity, State
from ..reporting.report import Report
from . import run, run_hits

_RANK = list(Severity)


class Observed(Struct, frozen=True):
    """A bug that is here, and whether this run hits it.

    ``because`` has the arguments that decide, ``unknown`` what we do not know. ``called`` has the number of calls of
    each target by this trainer so far.
    """

    id: str
    severity: Severity
    answer: Answer
    symptom: str
    because: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    called: Mapping[str, int] = {}

    def line(self) -> str:
        """Return the line of a hit for the beginning of training."""
        repair = "reports why" if self.severity is Severity.DIAGNOSIS else "repairs it"
        name = f"{self.id} ({self.severity.value})"
        return f"this run has {name}: {self.symptom}{_listed(self.because)}; TRL_HOTFIX=1 {repair}"

    def line_at_end(self) -> str:
        """Return the line of a hit for the end of training, whose code was called."""
        calls = ", ".join(f"{_short(target)} {run.times(count)}" for target, count in self.called.items() if count)
        return f"this run has {self.id}: it called {calls}"

    def to_dict(self) -> dict[str, Any]:
        """Return the entry for the record of the run."""
        return {"id": self.id, **self.told(), "called": dict(self.called)}

    def told(self) -> dict[str, Any]:
        """Return the answer, and what it depends on."""
        return {
            "severity": self.severity.value,
            "answer": self.answer.value,
            "symptom": self.symptom,
            "because": list(self.because),
            "unknown": list(self.unknown),
        }


def findings(trainer: Any, report: Report) -> list[Observed]:
    """Return every bug that ``report`` has as observed, with the answer for ``trainer``: hits and the worst first.

    Without a trainer (None) we know no arguments, and the list is empty.
    """
    if trainer is None:
        return []
    observed = []
    for status in report:
        if status.state is State.OBSERVED:
            found = run_hits.judged(trainer, status.patch, report.trl or "")
            called = run.called(trainer, status.patch)
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


def log_begin(observed: Iterable[Observed]) -> None:
    """Log one line for each hit when training begins. The record has the rest."""
    for one in observed:
        if one.answer is Answer.HIT:
            warning("%s", one.line(), extra=event("hit", patch=one.id, state=State.OBSERVED.value, **one.told()))


def in_doubt(observed: Iterable[Observed]) -> str:
    """Return what the first line of a run says of the bugs that no argument decides, or an empty text."""
    number = sum(one.answer is Answer.CANNOT_TELL for one in observed)
    return f"; {number} bugs depend on more than arguments: trl_hotfix.json has them" if number else ""


def log_end(observed: Iterable[Observed]) -> None:
    """Log one line for each hit whose code was called when training ends."""
    for one in observed:
        if any(one.called.values()) and one.answer is Answer.HIT:
            log.info("%s", one.line_at_end(), extra=event("called", patch=one.id, called=dict(one.called)))


def _listed(reasons: Iterable[str]) -> str:
    text = ", ".join(reasons)
    return f" ({text})" if text else ""


def _short(target: str) -> str:
    return target.partition(":")[2]
