"""Which known bugs a trainer call hits. The conditions of each bug are data: ``hits`` in ``patches.yaml``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace
from packaging.utils import canonicalize_name

from ..catalogue.conditions import Lookup
from ..matching import versions
from ..matching.hits import Answer, Finding, doubted, finding
from ..model import Bug, Severity
from .found import TrainerCall


@dataclass(frozen=True, slots=True)
class ScannedTrainer:
    """A trainer call, with the bugs that it hits and those that we cannot tell about, the most severe first.

    ``not_hit`` is the number of all other known bugs.
    """

    call: TrainerCall
    hits: tuple[Finding, ...]
    unsure: tuple[Finding, ...]
    not_hit: int


def judge(
    call: TrainerCall,
    patches: Iterable[Bug],
    trl: str,
    *,
    other_release: bool = False,
    told: Mapping[str, str] | None = None,
    fact: Lookup | None = None,
) -> ScannedTrainer:
    """Judge a trainer call by the bugs of ``patches`` on the release ``trl``.

    ``other_release``: ``trl`` is not the installed release. Then only the versions of ``told`` are known, and a
    requirement that is not met here may be met beside it. ``fact`` has what the user gave of model and launch.
    """
    versions_told = told or {}
    version_of = versions.installed_but(told=versions_told)
    findings = [
        doubted(
            finding(
                call.name,
                call.argument,
                patch,
                trl,
                version_of=version_of,
                is_known=lambda distribution: not other_release or canonicalize_name(distribution) in versions_told,
                fact=fact,
                position=call.position,
            ),
            trl,
        )
        for patch in patches
    ]
    # A finding without arguments is shown at the line of the trainer.
    findings = [_at_trainer(found, call) for found in findings]
    rank = list(Severity).index
    findings.sort(key=lambda found: (rank(found.patch.severity), found.patch.id))
    hits = tuple(found for found in findings if found.answer is Answer.HIT)
    unsure = tuple(found for found in findings if found.answer is Answer.CANNOT_TELL)
    return ScannedTrainer(call, hits, unsure, len(findings) - len(hits) - len(unsure))


def _at_trainer(found: Finding, call: TrainerCall) -> Finding:
    if found.lines:
        return found
    return replace(found, lines=(call.line,), places=found.places or (call.position(call.line),))
