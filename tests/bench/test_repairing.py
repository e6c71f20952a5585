"""What a patch repairs is found by runs with it alone."""

from __future__ import annotations

import pytest
from rich.console import Console

from trl_hotfix.relations.cells import ERROR, HOLDS, UNASKED, VIOLATED, Cell
from trl_hotfix.relations.compare import Difference

from bench.relations import repairing
from bench.relations.asking import claims_of, works_of
from bench.relations.repairing_inside import _gone
from bench.releases import layout


def cell(state: str, *differing: str) -> Cell:
    return Cell("SFT", "resume", "plain", state, "", tuple(Difference(what, 1.0, 2.0, 1.0) for what in differing))


@pytest.mark.parametrize(
    ("on", "gone"),
    [
        (cell(HOLDS), ["gradient of step 1", "loss of step 1"]),
        (cell(VIOLATED, "loss of step 1"), ["gradient of step 1"]),
        (cell(VIOLATED, "gradient of step 1", "loss of step 1", "entropy"), []),
        (cell(ERROR), []),
        (cell(UNASKED), []),
    ],
)
def test_a_patch_repairs_what_differs_no_longer_and_not_what_no_longer_runs(on: Cell, gone: list[str]) -> None:
    assert _gone(cell(VIOLATED, "gradient of step 1", "loss of step 1"), on) == gone


@pytest.mark.matrix
def test_the_patch_that_repairs_a_claim_is_found_among_those_that_act() -> None:
    place = layout.main_place(layout.releases()[-1])
    layout.build([place])
    quiet = Console(quiet=True)
    asked = works_of(place, "SFT", claims_of("SFT", ["evaluation"]), on=False)
    works = [*repairing.violated([*asked], 1, quiet)]
    found = {answer["setting"]: answer for answer in repairing.repaired(works, [], 1, quiet)}
    same = next(answer for setting, answer in found.items() if "training = evaluation" in setting)
    assert "training and evaluation: loss of step 1" in same["off"]
    assert "training and evaluation: loss of step 1" in same["repairs"]["sft-loss-normaliser-counts-first-token"]
    assert same["acted"] == ["sft-loss-normaliser-counts-first-token"]
