"""Which known bugs a trainer call hits. The conditions of each bug are data: ``hits`` in ``patches.yaml``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from msgspec.structs import replace

from ..catalogue.conditions import Lookup
from ..matching import versions
from ..matching.hits import Answer, Finding, finding
from ..model import Bug, Severity
from .trainer_calls import TrainerCall


@dataclass(frozen=True, slots=True)
class ScannedTrainer:
    """A trainer call, with the bugs that it hits and those that cannot be told, the most severe first.

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

    ``other_release``: ``trl`` is not the installed release. A requirement that is not met here may be met beside it.
    ``told`` has the versions of other distributions beside it, as far as they are told, ``fact`` what is told of the
    model and the launch.
    """
    versions_told = told or {}
    version_of = versions.installed_but(told=versions_told)
    findings = [
        finding(
            call.name,
            call.argument,
            patch,
            trl,
            other_release=other_release and not patch.requires.keys() <= versions_told.keys(),
            version_of=version_of,
            fact=fact,
        )
        for patch in patches
    ]
    # A finding without arguments is shown at the line of the trainer.
    findings = [found if found.lines else replace(found, lines=(call.line,)) for found in findings]
    rank = list(Severity).index
    findings.sort(key=lambda found: (rank(found.patch.severity), found.patch.id))
    hits = tuple(found for found in findings if found.answer is Answer.HIT)
    unsure = tuple(found for found in findings if found.answer is Answer.CANNOT_TELL)
    return ScannedTrainer(call, hits, unsure, len(findings) - len(hits) - len(unsure))
