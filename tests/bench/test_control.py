"""The control counts a bug that trains wrongly as found if a finding of the ledger names it."""

from __future__ import annotations

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Severity
from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

from bench.relations.control import bugs


def finding(relation: str, *trainers: str, patch: str | None = None, new: str | None = None) -> Finding:
    return Finding(relation, trainers, ("gradient",), "It is so.", patch=patch, new=new)


def test_a_bug_is_found_by_the_findings_that_it_causes() -> None:
    first, second, *_ = (patch for patch in loading.load() if patch.severity is Severity.WRONG_GRADIENT)
    findings = [
        finding("padding", "SFT", "DPO", patch=second.id),
        finding("padding", "DPO", "KTO", patch=second.id),
        finding("resume", "SFT", patch=second.id),
        finding("order", "SFT", new=first.id),
    ]
    found = bugs([first, second], findings)
    assert [bug.patch.id for bug in found] == [second.id, first.id]
    assert [bug.found_by for bug in found] == ["padding of SFT, DPO, KTO; resume of SFT", ""]


def test_what_only_logs_crashes_or_diagnoses_is_no_bug_of_training() -> None:
    others = [patch for patch in loading.load() if patch.severity in (Severity.WRONG_METRIC, Severity.CRASH)]
    assert others
    assert bugs(others, ledger.load()) == []
