"""The screen of ``trl-hotfix verify``: what its words and numbers mean."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.commands.verify_screen import losses, verdicts
from trl_hotfix.reporting.table import show

ABSENT: dict[str, Any] = {"patch": "a", "revision": 1, "trl": "0.19.1", "verdict": "absent", "why": "", "bodies": {}}

WHY = "TRL 0.19.1 does not have this bug (>=0.20)"


def shown(view: Any, capsys: pytest.CaptureFixture[str]) -> str:
    show(view)
    return " ".join(capsys.readouterr().out.split())


def test_a_bug_that_is_absent_is_told_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    cell: Any = {**ABSENT, "leaves": {"trl.x": {"red": {"verdict": "fixed", "measured": 1.0, "right": 1.0}}}}
    text = shown(verdicts([cell], {"a": WHY}), capsys)
    assert f"a is absent here: {WHY}. The self-test" in text
    assert "found nothing to repair" in text
    gone: Any = {**ABSENT, "why": "trl.x has no X.y", "leaves": {"trl.x": {}}}
    text = shown(verdicts([gone], {"a": WHY}), capsys)
    assert f"{WHY}. trl.x has no X.y." in text
    assert "self-test ran" not in text


@pytest.mark.parametrize(("green", "is_explained"), [(4.18, True), (3.3, False)])
def test_another_right_number_is_explained(
    green: float, is_explained: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {"red": {"verdict": "reproduced", "right": 3.3}, "green": {"verdict": "fixed", "right": green}}
    proof: Any = {"patch": "a", "verdict": "proven", "why": "", "runs": runs}
    cell: Any = {
        **ABSENT,
        "verdict": "proven",
        "leaves": {"trl.x": runs, "trl.y": {"red": {"verdict": "reproduced", "right": 9.0}}},
    }
    for view in (losses([proof]), verdicts([cell], {"a": WHY})):
        assert ("a: `right` is what the run of its row should have given" in shown(view, capsys)) is is_explained
