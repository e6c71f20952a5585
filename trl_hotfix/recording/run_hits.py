"""Which known bugs does this run hit? When training begins its trainer answers, and no script.

The conditions stand under ``hits`` in ``patches.yaml``. ``scan`` evaluates them on a script, and the run on its
trainer, with the trainer's own facts. The run keeps the answers. Nothing here raises into a run, or reads an element of
a tensor or a row of a dataset.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ..by_identity import ByIdentity
from ..catalogue import loading
from ..catalogue.conditions import Argument
from ..matching.hits import Answer, Finding, finding
from ..model import Bug, Reason, Severity, State
from ..patching import reach
from ..reporting import runs
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import RunHit
from .failures import training_goes_on
from .run import Repair, Word
from .trainer_arguments import TrainerArguments
from .trainer_facts import TrainerFacts

_BUG_IS_HERE = {
    *(Reason.PROVEN, Reason.REPRODUCED, Reason.SELF_TEST, Reason.WRAPPER_ERROR, Reason.MADE_BEFORE, Reason.COMPILED),
    *(Reason.BY_REQUEST, Reason.EXCLUDED, Reason.NOT_SELECTED, Reason.DEFAULT_OFF),
}
"""The reasons of a patch with which TRL's own code runs, or has run, where the wrapper is not."""


class _Asked(Struct):
    """What a trainer was asked since its run began: the findings by patch, and the facts, each asked for once."""

    findings: dict[str, Finding] = {}
    facts: dict[str, Argument] = {}


_asked: ByIdentity[_Asked] = ByIdentity()


def judged(trainer: Any, patch: Bug, trl: str) -> Finding:
    """Return whether the run of this trainer hits the bug of ``patch``. It is evaluated once, until ``begins()``."""
    asked = _asked.get(trainer)
    if asked is None:
        asked = _asked[trainer] = _Asked()
    found = asked.findings.get(patch.id)
    if found is None or found.patch is not patch:
        found = asked.findings[patch.id] = _evaluated(trainer, patch, trl, asked.facts)
    return found


def _evaluated(trainer: Any, patch: Bug, trl: str, facts: dict[str, Argument]) -> Finding:
    fact = TrainerFacts(trainer, facts).find
    try:
        return finding(name_of(trainer), TrainerArguments(trainer).find, patch, trl, fact=fact)
    # The arguments are objects of the program, whose attributes and comparisons may raise anything.
    except Exception as error:  # noqa: BLE001
        unknown = (f"its conditions cannot be evaluated ({type(error).__name__})",)
        return Finding(patch, Answer.CANNOT_TELL, patch.title, (), (), unknown)


def begins(trainer: Any, report: Report) -> tuple[RunHit, ...]:
    """Evaluate the conditions again, for a run that begins, and note the answers for ``status()``."""
    hits: tuple[RunHit, ...] = ()
    if trainer is not None:
        with training_goes_on("the bugs that this run hits are not in it"):
            _asked[trainer] = _Asked()
            hits = of(trainer, report)
            runs.note(trainer, hits)
    return hits


def of(trainer: Any, report: Report) -> tuple[RunHit, ...]:
    """Return the bugs of this TRL that the run hits or may hit: hits and the worst first.

    Without a trainer (None) there are no bugs.
    """
    if trainer is None:
        return ()
    hits = [hit for status in report if _is_here(status) and (hit := _hit(trainer, status, report.trl or ""))]
    answers, severities = list(Answer), [severity.value for severity in Severity]
    return tuple(sorted(hits, key=lambda hit: (answers.index(hit.answer), severities.index(hit.severity), hit.id)))


def without_repair(trainer: Any, report: Report) -> tuple[RunHit, ...]:
    """Return the known bugs without a repair that this run hits or may hit."""
    if trainer is None or report.trl is None:
        return ()
    found = [(bug, judged(trainer, bug, report.trl)) for bug in loading.without_repair()]
    return tuple(
        RunHit(bug.id, bug.title, bug.severity.value, finding.answer, finding.symptom, finding.because, finding.unknown)
        for bug, finding in found
        if finding.answer is not Answer.NOT_HIT
    )


def settled(hits: Iterable[RunHit], repairs: Iterable[Repair]) -> tuple[RunHit, ...]:
    """Return the hits as the run itself has answered them, where its arguments could not.

    A wrapper that acted had something to repair. One that was called in a step, and never acted, had nothing.
    """
    by_id = {repair.status.id: repair for repair in repairs}
    found = []
    for hit in hits:
        repair = by_id.get(hit.id)
        if repair is None or hit.answer is not Answer.CANNOT_TELL:
            found.append(hit)
        elif repair.word is Word.REPAIRED:
            found.append(replace(hit, answer=Answer.HIT, because=(*hit.because, _FOUND), unknown=()))
        elif repair.word is not Word.CALLED or not repair.is_over:
            found.append(hit)
    return tuple(found)


_FOUND = "found by the repair itself"


def was_asked(trainer: Any, report: Report) -> bool:
    """Return whether the trainer is known, and there is a bug to ask it about."""
    return trainer is not None and any(map(_is_here, report))


def _is_here(status: PatchStatus) -> bool:
    """Return whether this TRL has the bug, as far as is known, and its code is imported."""
    if status.state is State.SKIPPED:
        return status.degraded
    if status.state is State.DISABLED:
        return status.reason is not Reason.SWITCHED_OFF
    return status.state not in (State.RETIRED, State.PENDING)


def _hit(trainer: Any, status: PatchStatus, trl: str) -> RunHit | None:
    found = judged(trainer, status.patch, trl)
    if found.answer is Answer.NOT_HIT:
        return None
    answer, unknown = found.answer, found.unknown
    if status.reason not in _BUG_IS_HERE or _is_copy(trainer):
        # Another method runs than the one that the conditions are for.
        answer = Answer.CANNOT_TELL
        is_known = status.reason in _BUG_IS_HERE
        reason = (
            "its trainer is a copy of TRL's"
            if is_known
            else f"the patch is {status.state.value} ({status.reason.value})"
        )
        unknown = (*unknown, reason)
    patch = status.patch
    return RunHit(patch.id, patch.title, patch.severity.value, answer, found.symptom, found.because, unknown)


def to_dicts(hits: Iterable[RunHit], report: Report) -> list[dict[str, Any]]:
    """Return the entries for the record. Those that are observed are a list of their own there."""
    states = {hit.id: report[hit.id] for hit in hits}
    return [
        {**hit.to_dict(), "state": states[hit.id].state.value, "reason": states[hit.id].reason.value}
        for hit in hits
        if states[hit.id].state is not State.OBSERVED
    ]


def cause(hit: RunHit) -> str:
    """Return the arguments by which the run hits a bug."""
    return ", ".join(hit.because) or "as every run of this trainer"


def name_of(trainer: Any) -> str:
    """Return the name of the trainer's class in TRL, without ``Trainer``; of a copy, that of what it is a copy of."""
    for cls in type(trainer).__mro__:
        if reach.is_trls_own(cls):
            return cls.__name__.removesuffix("Trainer")
    for cls in type(getattr(trainer, "args", None)).__mro__:
        if f"{cls.__module__}.".startswith("trl.") and cls.__name__.endswith("Config"):
            return cls.__name__.removesuffix("Config")
    return type(trainer).__name__.removesuffix("Trainer")


def _is_copy(trainer: Any) -> bool:
    return not any(map(reach.is_trls_own, type(trainer).__mro__))
