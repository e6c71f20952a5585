"""Which known bugs does this run hit? When training begins everything is known: its trainer is asked, and no script.

The conditions are those of ``hits`` in ``patches.yaml``, which ``scan`` evaluates on a script, and the facts are those
of the trainer itself. The answers are kept for the run. Nothing here raises into a run, or reads an element of a tensor
or a row of a dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from msgspec import Struct

from ..by_identity import ByIdentity
from ..catalogue.conditions import Argument
from ..log import event, log
from ..matching.hits import Answer, Finding, finding
from ..model import Patch, Reason, Severity, State
from ..reporting import runs
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import RunHit
from ..reporting.sentences import because
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


def judged(trainer: Any, patch: Patch, trl: str) -> Finding:
    """Return whether the run of this trainer hits the bug of ``patch``. It is evaluated once, until ``begins()``."""
    asked = _asked.get(trainer)
    if asked is None:
        asked = _asked[trainer] = _Asked()
    found = asked.findings.get(patch.id)
    if found is None or found.patch is not patch:
        found = asked.findings[patch.id] = _evaluated(trainer, patch, trl, asked.facts)
    return found


def _evaluated(trainer: Any, patch: Patch, trl: str, facts: dict[str, Argument]) -> Finding:
    fact = TrainerFacts(trainer, facts).find
    try:
        return finding(name_of(trainer), TrainerArguments(trainer).find, patch, trl, fact=fact)
    # The arguments are objects of the program, whose attributes and comparisons may raise anything.
    except Exception as error:  # noqa: BLE001
        unknown = (f"its conditions cannot be evaluated ({type(error).__name__})",)
        return Finding(patch, Answer.CANNOT_TELL, patch.title, (), (), unknown)


def begins(trainer: Any, report: Report) -> tuple[RunHit, ...]:
    """Evaluate the conditions anew, for a run that begins, and note the answers for ``status()``."""
    hits: tuple[RunHit, ...] = ()
    if trainer is not None:
        with training_goes_on("the bugs that this run hits are not in it"):
            _asked[trainer] = _Asked()
            hits = of(trainer, report)
            runs.note(trainer, hits)
    return hits


def of(trainer: Any, report: Report) -> tuple[RunHit, ...]:
    """Return the bugs of this TRL that the run hits, or of which that cannot be told: hits and the worst first.

    Where the trainer is not known (None), nothing can be told of its arguments.
    """
    if trainer is None:
        return ()
    hits = [hit for status in report if _is_here(status) and (hit := _hit(trainer, status, report.trl or ""))]
    answers, severities = list(Answer), [severity.value for severity in Severity]
    return tuple(sorted(hits, key=lambda hit: (answers.index(hit.answer), severities.index(hit.severity), hit.id)))


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
    if status.reason not in _BUG_IS_HERE:
        # Another method runs than the one that the conditions are for.
        answer = Answer.CANNOT_TELL
        unknown = (*unknown, f"the patch is {status.state.value} ({status.reason.value})")
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


def log_begin(hits: Iterable[RunHit], report: Report, repairs: Iterable[Repair]) -> None:
    """Log one line for each bug that the run hits, and what becomes of it. What is degraded is a warning already."""
    words = {repair.status.id: repair.word for repair in repairs}
    for hit in hits:
        status = report[hit.id]
        if hit.answer is not Answer.HIT or status.degraded or status.state is State.OBSERVED:
            continue
        level, verb = _verb(status, words)
        told = {name: value for name, value in hit.to_dict().items() if name != "id"}
        fields = event("hit", patch=hit.id, state=status.state.value, **told)
        log.log(level, "%s: %s (bug: %s); your run: %s", verb, hit.id, hit.title, cause(hit), extra=fields)


def _verb(status: PatchStatus, words: Mapping[str, Word]) -> tuple[int, str]:
    """Return the level and the first words of a line. ``repaired`` is said of what has acted for this trainer."""
    repair = "report" if status.patch.severity is Severity.DIAGNOSIS else "repair"
    word = words.get(status.id)
    if word is Word.REPAIRED:
        return logging.INFO, f"{repair}ed"
    if word in (Word.CALLED, Word.STANDING_BY):
        return logging.INFO, f"{repair}s"
    if word is Word.SELECTED:
        return logging.WARNING, f"NOT {repair}ed in this run, the patch is on other trainers"
    return logging.INFO, f"not {repair}ed, {because(status.reason, status.evidence)}"


def log_end(hits: Iterable[RunHit], repairs: Iterable[Repair]) -> None:
    """Log one line for each repair that acted in the run, and for each bug that it hits. The rest is DEBUG."""
    by_id = {hit.id: hit for hit in hits if hit.answer is Answer.HIT}
    for repair in repairs:
        patch, hit = repair.status.patch, by_id.get(repair.status.id)
        fields = event(repair.word.value, patch=patch.id, title=patch.title, called=repair.called, acted=repair.acted)
        if repair.word is Word.SELECTED:
            continue
        if repair.word is Word.REPAIRED:
            verb = "reported" if patch.severity is Severity.DIAGNOSIS else "repaired"
            run = f"; your run: {cause(hit)}" if hit is not None else ""
            counts = f"acted in {repair.acted} of {repair.called} calls"
            log.info("%s: %s (bug: %s)%s; %s", verb, patch.id, patch.title, run, counts, extra=fields)
        else:
            log.log(logging.DEBUG if hit is None else logging.INFO, "%s", repair.line(), extra=fields)


def name_of(trainer: Any) -> str:
    """Return the name of the trainer's class in TRL, without ``Trainer``."""
    for cls in type(trainer).__mro__:
        if f"{cls.__module__}.".startswith("trl.") and cls.__name__.endswith("Trainer"):
            return cls.__name__.removesuffix("Trainer")
    return ""
