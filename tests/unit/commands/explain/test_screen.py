"""The answer of ``explain`` in a terminal; ``test_explain`` runs the whole command."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands.explain.answer import Answer
from trl_hotfix.commands.explain.screen import answer_view
from trl_hotfix.model import Patch
from trl_hotfix.reporting.table import show

from helpers.patch_examples import PATCH

UNKNOWN_BODY = "c1:0: on record for no release"


def an_answer(**changes: Any) -> Answer:
    answer: Any = {
        "trl_hotfix": "9.8.7",
        "id": "some-patch",
        "revision": 3,
        "title": "The [bold]loss",
        "severity": "crash",
        "harm": None,
        "trl": ">=0.11",
        "requires": {"deepspeed": ">=0.14.5"},
        "review_by": "2027-01-31",
        "layer": None,
        "fixed_in": None,
        "fixed_in_layers": {},
        "links": ["https://example.org/1"],
        "why": "One\nparagraph.\n\nAnother.",
        "how": "So.",
        "not_repaired": None,
        "retrain": None,
        "notes": "Notes.",
        "options": {"over": {"choices": {"all": "every token", "rows": "every row"}, "default": "all"}},
        "targets": [{"module": "trl.trainer.utils", "attribute": "pad", "trl": "==0.11.4", "called": "some steps"}],
        "proven_on": [],
        "proofs": [],
        "parity": [],
        "turn_off": ["TRL_HOTFIX_SKIP=some-patch"],
        "installed": "0.11.4",
        "state": "pending",
        "reason": "applies",
        "because": "It applies.",
        "trail": [{"gate": "TRL", "found": "0.11.4", "passed": True}],
        "differences": {},
    }
    answer.update(changes)
    result: Answer = answer
    return result


def lines_of(answer: Answer, capsys: pytest.CaptureFixture[str], patch: Patch = PATCH) -> list[str]:
    """Return the printed lines, with one space between words."""
    show(answer_view(answer, patch))
    return [" ".join(line.split()) for line in capsys.readouterr().out.splitlines() if line.strip()]


def proof(release: str, verdict: str, red: object, green: object, right: object = 2.0) -> dict[str, Any]:
    runs = {"red": {"measured": red, "right": right}, "green": {"measured": green, "right": right}}
    return {"release": release, "stack": "a", "verdict": verdict, "runs": runs}


def test_every_fact_has_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(an_answer(), capsys)
    assert lines[:9] == [
        "some-patch (revision 3)",
        "The [bold]loss",
        "What you see, and why",
        "One paragraph.",
        "Another.",
        "What the patch does",
        "So.",
        "More",
        "Notes.",
    ]
    for line in (
        "severity crash",
        "bug of TRL",
        "TRL >=0.11; still in the newest release we checked; we check again by 2027-01-31",
        "requires deepspeed >=0.14.5",
        "upstream https://example.org/1",
        "target trl.trainer.utils: pad (==0.11.4; called: some steps)",
        "option over=all (default): every token",
        "option over=rows: every row",
        "turn off TRL_HOTFIX_SKIP=some-patch",
        "Here: pending (applies)",
        "TRL 0.11.4 yes",
    ):
        assert line in lines
    undeclared = {"module": "trl.trainer.utils", "attribute": "pad", "trl": "==0.11.4", "called": None}
    assert "target trl.trainer.utils: pad (==0.11.4)" in lines_of(an_answer(targets=[undeclared]), capsys)
    assert "TRL >=0.11; fixed in 0.12.0" in lines_of(an_answer(fixed_in="0.12.0"), capsys)


def test_the_answer_for_a_trained_model_has_a_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Must I train again?" not in lines_of(an_answer(), capsys)
    lines = lines_of(an_answer(harm="metric", retrain="No: the weights are right."), capsys)
    start = lines.index("Must I train again?")
    assert lines[start + 1] == "No: the weights are right. (metric: only the log is wrong)"


def test_a_bug_of_a_layer_ends_where_the_layer_fixed_it(capsys: pytest.CaptureFixture[str]) -> None:
    requires = {"peft": ">=0.8", "transformers": ">=4.46,<5.3"}
    of_layer = {"layer": "transformers", "fixed_in_layers": {"transformers": "5.3"}}
    lines = lines_of(an_answer(requires=requires, **of_layer), capsys)
    rows = [
        "bug of transformers",
        "TRL >=0.11",
        "requires peft >=0.8",
        "requires transformers >=4.46,<5.3; fixed in 5.3",
    ]
    start = lines.index("bug of transformers")
    assert lines[start : start + 4] == rows


def test_a_gate_passes_or_not_or_cannot_be_told(capsys: pytest.CaptureFixture[str]) -> None:
    trail = [{"gate": f"gate{passed}", "found": "x", "passed": passed} for passed in (True, False, None)]
    lines = lines_of(an_answer(trail=trail), capsys)
    assert lines[-3:] == ["gateTrue x yes", "gateFalse x no", "gateNone x ?"]


@pytest.mark.parametrize(
    ("proofs", "expected"),
    [
        ([], None),
        ([proof("0.11.4", "unrepaired", 1.0, 1.0)], None),
        ([proof("0.11.4", "proven", "raised", 2.0)], None),
        ([proof("0.11.4", "proven", 1.0, 2.0)], "proof trained with TRL 0.11.4: 1 before, 2 patched, 2 is right"),
        ([proof("0.11.4", "proven", 1.0, 2.0, None)], "proof trained with TRL 0.11.4: 1 before, 2 patched"),
        (
            [proof("0.11.3", "error", 1.0, 1.0), proof("0.11.4", "proven", 1 / 3, 2.0), proof("0.12", "proven", 1, 2)],
            "proof trained with TRL 0.11.4: 0.3333333 before, 2 patched, 2 is right",
        ),
    ],
)
def test_the_first_proven_release_has_its_numbers(
    capsys: pytest.CaptureFixture[str], proofs: list[dict[str, Any]], expected: str | None
) -> None:
    lines = lines_of(an_answer(proofs=proofs), capsys)
    assert [line for line in lines if line.startswith("proof")] == ([expected] if expected else [])


def test_the_larger_difference_to_the_fixed_release_counts(capsys: pytest.CaptureFixture[str]) -> None:
    parity = {"release": "0.11.4", "fixed_release": "0.12.0", "loss_difference": 1e-9, "gradient_difference": 2e-7}
    lines = lines_of(an_answer(parity=[parity]), capsys)
    assert "proof patched TRL 0.11.4 is TRL 0.12.0, losses and gradients, to 2e-07" in lines


def test_a_difference_is_shown_with_its_target(capsys: pytest.CaptureFixture[str]) -> None:
    lines = lines_of(an_answer(differences={"trl.trainer.utils:pad": "-before\n+after"}), capsys)
    assert lines[-3:] == ["what has changed in trl.trainer.utils:pad", "-before", "+after"]


def test_an_unknown_body_comes_with_the_commands_that_show_the_changes(capsys: pytest.CaptureFixture[str]) -> None:
    (patch,) = (patch for patch in loading.load() if patch.id == "dpo-precomputed-ref-logps-dropped")
    trail = [{"gate": "body", "found": UNKNOWN_BODY, "passed": False}]
    text = " ".join(lines_of(an_answer(trail=trail), capsys, patch))
    assert "To see what has changed since TRL " in text
    assert f"trl-hotfix explain {patch.id} --against trl-" in text
    # A patch of a pack may have no release on record.
    assert "To see what has changed" not in " ".join(lines_of(an_answer(trail=trail), capsys))
    passed = [{"gate": "body", "found": UNKNOWN_BODY, "passed": None}]
    assert "To see what has changed" not in " ".join(lines_of(an_answer(trail=passed), capsys, patch))
