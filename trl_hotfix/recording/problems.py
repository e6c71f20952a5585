"""What is wrong with the repairs of a run, in words: for the log, the record, and the error of strict mode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import printable
from ..log import log
from ..matching.hits import Answer
from ..model import State
from ..reporting.report import PatchStatus, Report
from ..reporting.runs import RunHit
from ..selection import freeze_files
from . import ranks, run_hits


def compare_with_checkpoint(in_checkpoint: Any, record: dict[str, Any]) -> None:
    """Warn if the checkpoint from which the run resumes was trained with other repairs."""
    before = freeze_files.record(in_checkpoint)
    if before is None:
        log.warning("the checkpoint's record of its repairs cannot be read; they may be other ones")
        return
    for difference in ranks.differences(before, record, "in the checkpoint", "now"):
        log.warning("this run goes on from a checkpoint of other repairs: %s", difference)


def unrepaired(report: Report, hits: Iterable[RunHit] = ()) -> list[str]:
    """Return the patches that should be on and are not, or do not reach the trainer, each in a line."""
    has = {hit.id: f"; this run has the bug: {run_hits.cause(hit)}" for hit in hits if hit.answer is Answer.HIT}
    return [
        printable(f"{status.id}: {status.state.value} ({status.reason.value}){_by(status)}{has.get(status.id, '')}")
        for status in report.degraded
    ]


def _by(status: PatchStatus) -> str:
    """Return what keeps an unreached patch from the trainer."""
    if status.state is not State.UNREACHED:
        return ""
    parts = [part for part in status.evidence.values() if isinstance(part, Mapping)]
    return "".join(f": {by}" for by in dict.fromkeys(part["by"] for part in parts if "by" in part))
