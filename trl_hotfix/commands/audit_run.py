"""Which known bugs hit an old run, by the files that it has left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from ..errors import ScriptError, plain
from ..matching.hits import Answer as HitAnswer
from ..matching.hits import Finding, doubted, finding
from ..model import Bug as AnyBug
from ..model import Severity
from ..reporting.sentences import repair_of
from ..scanning.old_runs import OldRun, read_run
from .audit_answer import Answer, Bug, answer_of, bug_of


def audit_run(path: Path, told: Mapping[str, str], patches: Sequence[AnyBug]) -> Answer:
    """Return the bugs that hit the run of an output folder. Raises ``ScriptError`` if its files are not enough."""
    run = read_run(path)
    run = replace(run, versions={**run.versions, **told})
    trl = run.versions.get("trl")
    if trl is None:
        raise ScriptError(f"{plain(str(path))} does not tell its release of TRL (its model card does); --trl tells it")
    if run.trainer is None:
        raise ScriptError(
            f"{plain(str(path))} does not tell its trainer: expected a training_args.bin of a trainer of TRL in it"
        )
    bugs = [bug for patch in patches if (bug := _bug_of_run(run, run.trainer, patch, trl)) is not None]
    bugs += _bugs_of_packs(run, patches)
    has_record = run.repaired is not None
    trainer = f"{run.trainer}Trainer"
    return answer_of("run", path, 1, trl, dict(run.versions), bugs, trainer=trainer, has_record=has_record)


def _bug_of_run(run: OldRun, trainer: str, patch: AnyBug, trl: str) -> Bug | None:
    repaired = "unknown" if run.repaired is None else run.repaired.get(patch.id, "no")
    if repair_of(patch) == "none":
        repaired = "none"
    recorded = run.hits.get(patch.id)
    if recorded is not None:
        if recorded.answer == HitAnswer.NOT_HIT.value:
            return None
        symptom = recorded.symptom or patch.title
        return bug_of(patch, recorded.answer, repaired, "record", symptom, recorded.because, recorded.unknown)
    found = _inferred(run, trainer, patch, trl)
    if found.answer is HitAnswer.NOT_HIT:
        return None
    return bug_of(patch, found.answer.value, repaired, "files", found.symptom, found.because, found.unknown)


def _inferred(run: OldRun, trainer: str, patch: AnyBug, trl: str) -> Finding:
    """Return the answer of the files that a run leaves without trl_hotfix."""

    def version_of(distribution: str) -> str | None:
        return run.versions.get(canonicalize_name(distribution))

    def is_known(distribution: str) -> bool:
        return version_of(distribution) is not None

    found = finding(trainer, run.argument, patch, trl, version_of=version_of, is_known=is_known)
    return doubted(found, trl)


def _bugs_of_packs(run: OldRun, patches: Sequence[AnyBug]) -> Iterator[Bug]:
    """Yield the bugs of a record that the catalogue does not have: those of a pack, or of a newer trl_hotfix."""
    known = {patch.id for patch in patches}
    for hit in run.hits.values():
        is_hit = hit.answer != HitAnswer.NOT_HIT.value and hit.id not in known
        if is_hit and hit.severity is not None and hit.severity is not Severity.DIAGNOSIS:
            yield {
                "id": hit.id,
                "title": hit.symptom,
                "severity": hit.severity.value,
                "harm": None,
                "retrain": None,
                "answer": hit.answer,
                "repaired": (run.repaired or {}).get(hit.id, "no"),
                "run_repairs": None,
                "layer": None,
                "fixed_in": None,
                "fixed_in_layers": {},
                "symptom": hit.symptom,
                "because": list(hit.because),
                "unknown": list(hit.unknown),
                "source": "record",
            }
