"""What the log says of a run: each bug that it hits, when training begins; each repair that acted, when it ends.

Only rank 0 says it. The callback has a WARNING for each degraded patch already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from ..log import event, log, warning
from ..matching.hits import Answer
from ..model import Severity, State
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import RunHit
from ..reporting.sentences import because
from . import observation, run, run_hits, sums
from .run import Repair, Word


def begins(trainer: Any, report: Report, activity: str) -> None:
    """Log one line for each bug that the run hits, or that it hits none. The patches by their words are DEBUG."""
    repairs, observed = run.repairs(trainer, report), observation.findings(trainer, report)
    digest = run.frozen(trainer, report)["digest"]
    words = "repairing nothing" if report.observe else run.summary(repairs)
    words += observation.in_doubt(observed)
    fields = {"digest": digest, "trl": report.trl}
    log.debug("%s with TRL %s, digest %s: %s", activity, report.trl, digest, words, extra=event(activity, **fields))
    if trainer is None:
        return
    _log_hits(run_hits.settled(run_hits.of(trainer, report), repairs), report, repairs)
    observation.log_begin(observed)
    found = sums.of(trainer, report, repairs)
    if not found.hit:
        log.info("%s", found.begins(report.trl), extra=event("no-hit", **fields, **found.fields()))


def _log_hits(hits: Iterable[RunHit], report: Report, repairs: Iterable[Repair]) -> None:
    words = {repair.status.id: repair.word for repair in repairs}
    for hit in hits:
        status = report[hit.id]
        if hit.answer is not Answer.HIT or status.degraded or status.state is State.OBSERVED:
            continue
        is_on, verb = _verb(status, words)
        told = {name: value for name, value in hit.to_dict().items() if name != "id"}
        fields = event("hit-repaired" if is_on else "hit", patch=hit.id, state=status.state.value, **told)
        level = logging.INFO if is_on else logging.WARNING
        log.log(level, "%s: %s (bug: %s); your run: %s", verb, hit.id, hit.title, run_hits.cause(hit), extra=fields)


def _verb(status: PatchStatus, words: Mapping[str, Word]) -> tuple[bool, str]:
    """Return whether the repair is on for this trainer, and the first words of the line."""
    repair = "report" if status.patch.severity is Severity.DIAGNOSIS else "repair"
    word = words.get(status.id)
    if word is None:
        return False, f"not {repair}ed, {because(status.reason, status.evidence)}"
    if word is Word.SELECTED:
        return False, f"NOT {repair}ed in this run, the patch is on other trainers"
    return True, f"{repair}ed" if word is Word.REPAIRED else f"{repair}s"


def ends(trainer: Any, report: Report) -> None:
    """Log what is wrong with a repair, one line for each that acted, and for each that a hit has, and the sum."""
    repairs = run.repairs(trainer, report)
    for repair in repairs:
        for problem in repair.problems():
            warning("%s", problem, extra=event("problem", patch=repair.status.id))
    _log_repairs(run_hits.settled(run_hits.of(trainer, report), repairs), repairs)
    observation.log_end(observation.findings(trainer, report))
    if trainer is not None:
        found = sums.of(trainer, report, repairs)
        fields = {"digest": run.frozen(trainer, report)["digest"], "trl": report.trl, **found.fields()}
        log.info("%s", found.ends(report.trl), extra=event("sum", **fields))


def _log_repairs(hits: Iterable[RunHit], repairs: Iterable[Repair]) -> None:
    by_id = {hit.id: hit for hit in hits if hit.answer is Answer.HIT}
    for repair in repairs:
        patch, hit = repair.status.patch, by_id.get(repair.status.id)
        if repair.word is Word.SELECTED:
            continue
        told = {"patch": patch.id, "title": patch.title, "called": repair.called, "acted": repair.acted}
        if repair.word is Word.REPAIRED:
            verb = "reported" if patch.severity is Severity.DIAGNOSIS else "repaired"
            cause = f"; your run: {run_hits.cause(hit)}" if hit is not None else ""
            log.info(
                "%s: %s (bug: %s)%s; %s",
                verb,
                patch.id,
                patch.title,
                cause,
                repair.counts(),
                extra=event("repaired", **told),
            )
        else:
            fields = event("not-acted", word=repair.word.value, **told)
            log.log(logging.DEBUG if hit is None else logging.INFO, "%s", repair.line(), extra=fields)
