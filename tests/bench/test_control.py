"""The control counts a bug that trains wrongly as found if a finding of the ledger names it."""

from __future__ import annotations

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Severity
from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

from bench.relations.control import bugs, mistakes, reasons
from bench.releases.layout import CHECKOUT


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


def test_a_line_has_what_finds_a_bug_or_why_nothing_can() -> None:
    first, second, third, *_ = (patch for patch in loading.load() if patch.severity is Severity.WRONG_GRADIENT)
    with_setting = Finding("padding", ("SFT",), ("gradient",), "It is so.", setting="packing=True", patch=third.id)
    found = bugs([first, second, third], [with_setting], {second.id: "It needs two machines."})
    assert [str(bug) for bug in found] == [
        f"| {third.id} | padding (packing=True) of SFT |",
        f"| {second.id} | It needs two machines. |",
        f"| {first.id} | not found yet |",
    ]


def test_a_reason_of_a_found_bug_and_of_none_is_a_mistake() -> None:
    first, *_ = (patch for patch in loading.load() if patch.severity is Severity.WRONG_GRADIENT)
    found = bugs([first], [finding("order", "SFT", patch=first.id)], {first.id: "Nobody can."})
    assert [*mistakes(found, {first.id: "Nobody can.", "no-bug": "It is none."})] == [
        f"{first.id} is found, and has a reason why it cannot be seen: Nobody can.",
        "no-bug is no bug that trains wrongly",
    ]


def test_no_reason_on_record_is_a_mistake_and_the_page_has_the_figures() -> None:
    found = bugs(loading.load(), ledger.load(), reasons())
    assert [*mistakes(found, reasons())] == []
    seen, unseen = sum(bool(bug.findings) for bug in found), sum(bool(bug.unseen) for bug in found)
    assert 2 * seen > len(found)
    said = (
        f"The relations find {seen} of the {len(found)}. They cannot see {unseen}, and {len(found) - seen - unseen} are"
    )
    assert said in (CHECKOUT / "docs/relations.md").read_text(encoding="utf-8")
