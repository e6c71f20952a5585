"""The relations find what is known to be wrong, in a release that has it, and hold where it is repaired."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from trl_hotfix.relations.cells import HOLDS, ON_RECORD, VIOLATED
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.trainers import NO_RECIPE, RECIPES

from bench.proving.running import lines_of
from bench.releases import layout

NEWEST = layout.releases()[-1]
TRAINERS = ("KTO", "Reward", "RLOO", "SFT", "DPO", "GRPO")
"""In this order, since the first relations are asked of every loss that DPO and GRPO have."""


def cells(trainer: str, relations: Sequence[str], *, on: bool = True) -> list[dict[str, Any]]:
    """Ask a trainer of the newest release."""
    place = layout.main_place(NEWEST)
    layout.build([place])
    task = {"trainer": trainer, "recipe": False, "on": on, "having": "", "relations": list(relations)}
    log = f"relations-{trainer.replace(':', '-')}"
    found, why = lines_of(place, "trl_hotfix.relations.inside", task, 300, log, ("deepspeed", "images", "liger"))
    assert found, why
    return found


def violated(found: Sequence[dict[str, Any]]) -> dict[str, set[str]]:
    """Return what differs, without its step, by claim."""
    return {
        f"{cell['relation']}: {cell['setting']}": {
            each["what"].partition(" of step ")[0] for each in cell["differences"]
        }
        for cell in found
        if cell["state"] in (VIOLATED, ON_RECORD)
    }


def trainer_of(number: int, relation: str) -> str:
    """Return the trainer that is asked the relation: each in turn, of those that have a claim."""
    in_turn = TRAINERS[number % len(TRAINERS) :] + TRAINERS[: number % len(TRAINERS)]
    return next(name for name in in_turn if list(RELATIONS[relation].claims(RECIPES[name])))


TRAINER_OF = {relation: trainer_of(number, relation) for number, relation in enumerate(RELATIONS)}


@pytest.fixture(scope="module")
def found_by() -> Callable[[str], list[dict[str, Any]]]:
    """Return the cells of a trainer: it has one process for all that it is asked."""

    @functools.cache
    def found(trainer: str) -> list[dict[str, Any]]:
        names = [name for name in RELATIONS if TRAINER_OF[name] == trainer]
        return cells(trainer, names)

    return found


@pytest.mark.parametrize("relation", RELATIONS)
def test_each_relation_can_be_asked(relation: str, found_by: Callable[[str], list[dict[str, Any]]]) -> None:
    found = [cell for cell in found_by(TRAINER_OF[relation]) if cell["relation"] == relation]
    assert found
    unasked = [cell["why"] for cell in found if cell["state"] in ("error", "cannot be asked")]
    # A recipe has losses and neutral options of other releases too, and continuous batching needs transformers 5.
    known = ("Unknown loss type", "Config has no ", "requires transformers>=5.8.0")
    assert [why for why in unasked if not any(part in why for part in known)] == []


TRAINER_CLASS = re.compile(r"^class (\w+)Trainer\(", re.MULTILINE)


def test_every_trainer_of_every_release_has_a_recipe_or_a_reason() -> None:
    found = {
        name
        for release in layout.releases()
        for file in (layout.main_place(release).overlay / "trl").rglob("*_trainer.py")
        for name in TRAINER_CLASS.findall(file.read_text(encoding="utf-8"))
    }
    of_recipes = {name for recipe in RECIPES.values() for name in recipe.trainers or (recipe.name,)}
    assert not of_recipes & NO_RECIPE.keys()
    assert found == of_recipes | NO_RECIPE.keys() | {"Base", "_Base"}


REPAIRED = [
    ("SFT", "resume", "resume: batch_size=4 = batch_size=4 resume_at=2", "num_tokens", "num-tokens-reset-on-resume"),
    (
        "DPO",
        "resume",
        "resume: batch_size=4 adapter=model = batch_size=4 adapter=model resume_at=2",
        "gradient",
        "peft-resume-restarts-adapter",
    ),
]


@pytest.mark.matrix
@pytest.mark.parametrize(("trainer", "relation", "claim", "what", "patch_id"), REPAIRED, ids=lambda value: value)
def test_a_bug_is_found_without_its_patch_and_gone_with_it(
    trainer: str, relation: str, claim: str, what: str, patch_id: str
) -> None:
    without, repaired = (violated(cells(trainer, [relation], on=on)) for on in (False, True))
    assert what in without[claim], patch_id
    assert what not in repaired.get(claim, set()), patch_id


MISTAKES = {
    "DividesByMicroBatch": "accumulation: plain = batch_size=4 accumulation=2",
    "DividesByWidth": "padding: plain = width=16",
    "CentresAdvantagesAgain": "accumulation: plain = batch_size=4 accumulation=2",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_wrong_subclass_is_found_and_what_trl_violates_is_not_its_fault(mistake: str) -> None:
    found = cells(f"helpers.wrong_trainers:{mistake}", ["accumulation", "padding"])
    assert "gradient" in violated(found)[MISTAKES[mistake]]
    # TRL averages the entropy over micro-batches, whoever inherits it.
    assert not any("entropy" in what for what in violated(found).values())


WITH_FORMULA = (
    *("SFT", "DPO", "GRPO", "KTO", "Reward", "RLOO", "GMPO", "A2PO", "CPO", "ORPO", "TPO"),
    *("GKD", "GOLD", "Distillation", "IWOPD"),
)
"""The trainers of the newest release that have a formula."""


def test_a_formula_that_is_wrong_is_found() -> None:
    place = layout.main_place(NEWEST)
    layout.build([place])
    log = "relations-wrong-formulas"
    found, why = lines_of(place, "helpers.wrong_formulas", {"trainers": WITH_FORMULA}, 600, log)
    assert {cell["trainer"] for cell in found} == set(WITH_FORMULA), why
    for cell in found:
        expected = VIOLATED if cell["wrong"] else HOLDS
        assert cell["state"] == expected, f"{cell['trainer']}, formula {cell['wrong']}: {cell['why']}"
