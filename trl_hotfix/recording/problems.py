"""What is wrong with the repairs of a run, in words: for the log, the record, and the error of strict mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import NotAppliedError, printable
from ..log import event, warning
from ..matching.hits import Answer
from ..model import State, Strict
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import RunHit
from ..selection import freeze_files
from . import ranks, run_hits
from .agreement import Agreed, Problem
from .run import Repair, Word


def compare_with_checkpoint(in_checkpoint: Any, record: dict[str, Any]) -> None:
    """Warn if the checkpoint from which the run resumes was trained with other repairs."""
    before = freeze_files.record(in_checkpoint)
    if before is None:
        unread = "the checkpoint's record of its repairs cannot be read; they may be other ones"
        warning(unread, extra=event("checkpoint"))
        return
    differences = ranks.differences(before, record, "in the checkpoint", "now")
    if differences:
        # What the run hits comes first: the rest may be of bugs that it does not have.
        entries = [entry for name in ("hits", "observed") for entry in record.get(name, ())]
        hit = {entry["id"] for entry in entries if entry["answer"] == Answer.HIT.value}
        differences.sort(key=lambda line: line.partition(" ")[0] not in hit)
        more = f" and {len(differences) - _MANY} more" if len(differences) > _MANY else ""
        named = "; ".join(differences[:_MANY])
        fields = event("checkpoint", differences=differences)
        warning("this run goes on from a checkpoint of other repairs: %s%s", named, more, extra=fields)


_MANY = 3
"""So many differences are in the log. The two records have all."""


def unrepaired(report: Report, hits: Iterable[RunHit] | None, repairs: Iterable[Repair] = ()) -> list[Problem]:
    """Return the patches that should be on and are not, or do not reach the trainer.

    With ``repairs`` of a run that has taken a step, so is a bug that it hits and whose method one of its own replaces.
    ``hits`` are the bugs that the run hits or may hit. If its trainer is not known (None), it may hit them all.
    """
    may_hit = {hit.id for hit in hits} if hits is not None else {status.id for status in report.degraded}
    has = {hit.id: f"; this run has the bug: {run_hits.cause(hit)}" for hit in hits or () if hit.answer is Answer.HIT}
    return [
        Problem(
            printable(
                f"{status.id}: {status.state.value} ({status.reason.value}){_by(status)}{has.get(status.id, '')}"
            ),
            status.id,
            Strict.RUN if status.id in may_hit else Strict.ALL,
            is_hit=status.id in has,
        )
        for status in report.degraded
    ] + [
        Problem(
            printable(f"{repair.status.id}: no step called it, but {repair.overridden}{has[repair.status.id]}"),
            repair.status.id,
            is_hit=True,
        )
        for repair in repairs
        if repair.overridden and repair.word is Word.STANDING_BY and repair.status.id in has
    ]


def without_repair(hits: Iterable[RunHit]) -> list[Problem]:
    """Return the known bugs that a run hits and that nobody can repair. They end no run."""
    return [
        Problem(
            printable(f"{hit.id}: there is no repair of it ({hit.title}); this run has the bug: {run_hits.cause(hit)}"),
            hit.id,
            ends=None,
            is_hit=True,
        )
        for hit in hits
        if hit.answer is Answer.HIT
    ]


def not_applied(agreed: Agreed, what: str, rank: int, world: int, way_on: str) -> NotAppliedError:
    """Return the error of strict mode: on rank 0 with all reasons, elsewhere with one of them; and the way on."""
    reasons = agreed.ending
    everywhere = " on any rank" if world > 1 else ""
    lines = "".join(f"\n  {problem.line()}" for problem in (reasons if rank == 0 else reasons[:1]))
    more = f"\n  and {len(reasons) - 1} more, which rank 0 names" if rank and len(reasons) > 1 else ""
    return NotAppliedError(f"strict mode: {what}{everywhere}:{lines}{more}\nTo go on without: {way_on}")


def _by(status: PatchStatus) -> str:
    """Return what keeps an unreached patch from the trainer."""
    if status.state is not State.UNREACHED:
        return ""
    parts = [part for part in status.evidence.values() if isinstance(part, Mapping)]
    return "".join(f": {by}" for by in dict.fromkeys(part["by"] for part in parts if "by" in part))
