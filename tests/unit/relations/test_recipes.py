"""How a trainer is found in a release, and what it is given."""

from __future__ import annotations

from typing import Any

import pytest

from trl_hotfix.relations.materials import LONGEST, AnswersFromTable
from trl_hotfix.relations.recipes import parameters
from trl_hotfix.relations.setting import CannotBeAskedError
from trl_hotfix.relations.trainers import NO_RECIPE, RECIPES, recipe_of


def trainer(name: str, module: str, *bases: type) -> type:
    return type(name, bases, {"__module__": module})


GRPO = trainer("GRPOTrainer", "trl.trainer.grpo_trainer")
GSPO = trainer("GRPOTrainer", "trl.experimental.gspo_token.grpo_trainer", GRPO)
GMPO = trainer("GMPOTrainer", "trl.experimental.gmpo.gmpo_trainer", GRPO)
PPO = trainer("PPOv2Trainer", "trl.trainer.ppov2_trainer")


@pytest.mark.parametrize(("base", "name"), [(GRPO, "GRPO"), (GSPO, "GSPOToken"), (GMPO, "GMPO"), (PPO, "PPO")])
def test_a_subclass_has_the_recipe_of_the_nearest_trainer_of_trl(base: type, name: str) -> None:
    assert recipe_of(trainer("Mine", "my_project", base)).name == name


@pytest.mark.parametrize("name", NO_RECIPE)
def test_what_has_no_recipe_cannot_be_asked(name: str) -> None:
    with pytest.raises(CannotBeAskedError, match="give a recipe"):
        recipe_of(trainer(f"{name}Trainer", "trl.trainer.some_trainer"))


def test_variants_change_something_and_each_is_another() -> None:
    for recipe in RECIPES.values():
        assert all(dict(variant) not in ({}, recipe.options) for variant in recipe.variants), recipe.name
        assert len({repr(variant) for variant in recipe.variants}) == len(recipe.variants), recipe.name


class OfTransformers:
    def __init__(self, model: Any, args: Any, optimizers: Any = None) -> None: ...


class OfTrl(OfTransformers):
    def __init__(self, model: Any, args: Any, processing_class: Any = None, peft_config: Any = None) -> None: ...


class PassesOn(OfTrl):
    def __init__(self, teacher: Any, *args: Any, **kwargs: Any) -> None: ...


def test_a_constructor_takes_what_it_names_and_what_it_passes_on() -> None:
    assert parameters(OfTrl) == {"model", "args", "processing_class", "peft_config"}
    assert parameters(PassesOn) == {"teacher", *parameters(OfTrl)}


def answers(table: AnswersFromTable, rows: list[list[int]]) -> list[list[int]]:
    torch = pytest.importorskip("torch")
    found: list[list[int]] = table(torch.tensor(rows))[:, len(rows[0]) :].tolist()
    return [[token for token in one if token] for one in found]


def test_an_answer_depends_on_its_prompt_and_on_how_often_that_was_asked() -> None:
    rows = [[0, 5, 6], [7, 8, 9], [0, 5, 6]]
    first, other, second = answers(AnswersFromTable(None, 2), rows)
    assert first != second
    table = AnswersFromTable(None, 2)
    # Padding, the other rows of a batch and their order are no part of the prompt.
    assert answers(table, [[7, 8, 9, 0], [5, 6, 0, 0]]) == [other, first]
    assert answers(table, [[5, 6]]) == [second]
    assert answers(table, [[5, 6]]) == [first]


def test_all_answers_have_the_same_length_where_it_is_asked_for() -> None:
    table = AnswersFromTable(None, 4, equal_lengths=True)
    assert {len(one) for one in answers(table, [[0, 5, 6], [7, 8, 9]] * 4)} == {LONGEST}


def test_a_trainer_that_asks_for_logits_gets_those_of_the_policy_for_each_token() -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")

    class Policy:
        def __call__(self, input_ids: Any, **kwargs: Any) -> Any:
            class Output:
                logits = torch.nn.functional.one_hot(input_ids.roll(-1, 1), 70).float()

            return Output

    generation = transformers.GenerationConfig(temperature=0.5)
    returned = AnswersFromTable(Policy(), 1)(
        torch.tensor([[5, 6]]), None, generation, return_dict_in_generate=True, output_scores=True
    )
    tokens = returned.sequences[0, 2:].tolist()
    assert [int(each.argmax()) for each in returned.logits] == tokens
    assert [float(each.max()) for each in returned.scores] == [2.0] * len(tokens)
