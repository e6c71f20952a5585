"""A report: its digest, and the table that Jupyter shows."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

import trl_hotfix
from trl_hotfix.catalogue import loading
from trl_hotfix.model import Reason, State
from trl_hotfix.reporting.report import PatchStatus, Report

from helpers.made_up_patches import is_marked, mark

HOSTILE = "<script>alert('x')</script> & \"so on\""


@pytest.fixture
def report() -> Report:
    """A report with an applied patch, a conflicted one and one for another release."""
    on, off, elsewhere = loading.load()[:3]
    hostile = replace(off, id=HOSTILE, title=HOSTILE, trl=HOSTILE)
    evidence: dict[str, Any] = {"by": HOSTILE}
    statuses = (
        PatchStatus(on, State.APPLIED, Reason.PROVEN, {}, ()),
        PatchStatus(elsewhere, State.SKIPPED, Reason.TRL_VERSION, {"installed": "0.11.4", "range": "<0.11"}, ()),
        PatchStatus(hostile, State.CONFLICTED, Reason.FOREIGN_WRAPPER, evidence, ()),
    )
    return Report(HOSTILE, HOSTILE, "3.11.7", statuses)


def rows(report: Report) -> list[list[str]]:
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    return [["".join(cell.itertext()) for cell in row] for row in page.iter("tr")]


HEAD = ["patch", "state", "why", "repairs", "TRL range"]


def test_each_patch_has_a_row_with_its_state_and_reason(report: Report) -> None:
    found = rows(report)
    assert [row for row in found if row == HEAD] == [HEAD, HEAD]
    assert {row[0]: row[1:3] for row in found if row != HEAD and row[0] != HOSTILE} == {
        report.patches[0].id: ["applied (proven)", "reproduced before, fixed after, in this process"],
        report.patches[1].id: ["skipped (trl-version)", "TRL 0.11.4 does not have this bug (<0.11)"],
    }


def test_a_degraded_patch_comes_first_and_is_red(report: Report) -> None:
    ids = [row[0] for row in rows(report) if row != HEAD]
    assert ids == [HOSTILE, report.patches[0].id, report.patches[1].id]
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    styles = [style.get("style") or "" for style in page.iter("span")]
    assert ["#c9302c" in style for style in styles] == [True, False, False]
    assert len(set(styles)) == 3


def test_what_is_on_is_shown_and_the_rest_is_folded(report: Report) -> None:
    page = ElementTree.fromstring(f"<div>{report._repr_html_()}</div>")
    (folded,) = page.iter("details")
    assert folded.find("summary") is not None
    inside = "".join(folded.itertext())
    assert report.patches[1].id in inside
    assert report.patches[0].id not in inside
    assert HOSTILE not in inside
    nothing = replace(report, patches=report.patches[1:2])
    assert "No patch is on." in nothing._repr_html_()
    assert "<details" not in replace(report, patches=report.patches[:1])._repr_html_()


def test_the_repr_is_one_line_that_names_what_is_not_on(report: Report) -> None:
    line = repr(replace(report, trl="0.11.4", trl_hotfix="0.1.0\n\x1b[31m"))
    assert line.isprintable()
    assert line.endswith(f"1 skipped, 1 conflicted, 1 applied; not on: {HOSTILE}>")
    assert repr(replace(report, patches=())).endswith(": no patch>")
    many = replace(report, patches=report.patches[2:] * 100)
    assert len(repr(many)) < 600
    assert repr(many).endswith("and 95 more>")
    assert repr(report.patches[0]) == f"<{report.patches[0].id}: applied (proven)>"
    assert len(repr(trl_hotfix.status())) < 1000


def test_hostile_text_is_escaped(report: Report) -> None:
    page = report._repr_html_()
    assert "<script" not in page
    assert page.count("&lt;script&gt;") == 6
    assert rows(report)[1] == [HOSTILE, "conflicted (foreign-wrapper)", f"by {HOSTILE}", HOSTILE, HOSTILE]


def test_the_report_of_this_process_is_shown(fresh_engine: Any) -> None:
    shown = fresh_engine.status()._repr_html_()
    assert all(patch.id in shown for patch in loading.load())


def test_the_digest_identifies_the_applied_patches(declare: Any) -> None:
    declare(is_marked, mark)
    dry = trl_hotfix.apply(dry_run=True).digest
    assert trl_hotfix.apply().digest == dry
    assert trl_hotfix.revert().digest != dry
    assert trl_hotfix.apply().digest == dry
