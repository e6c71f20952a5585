"""A changed setting has its trainer given something else, whoever makes the trainer."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.relations import changes, forms, more_of_forms, more_of_models
from trl_hotfix.relations.architectures import ARCHITECTURES
from trl_hotfix.relations.by_hand import FORMULAS
from trl_hotfix.relations.changes import CHANGES, NEEDS, Changed, applied, changed
from trl_hotfix.relations.images import HELD
from trl_hotfix.relations.recipes import Recipe
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.setting import CannotBeAskedError, Setting
from trl_hotfix.relations.trainers import RECIPES


class Trainer:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments


class Own(Trainer):
    """A user's subclass."""


class OfTrainers(Recipe):
    def classes(self) -> tuple[Any, Any]:
        return Trainer, None

    def make(self, setting: Setting, folder: Path, trainer_class: Any = None) -> Any:
        return (trainer_class or Trainer)(rows=[1, 2])


RECIPE = OfTrainers("SFT", "text")


@pytest.fixture
def more(monkeypatch: pytest.MonkeyPatch) -> str:
    def add(arguments: dict[str, Any], folder: Path) -> None:
        arguments["rows"] = [*arguments["rows"], folder.name]

    monkeypatch.setitem(CHANGES, "a row more", add)
    return "a row more"


def test_a_trainer_of_ours_gets_what_the_change_makes_of_its_arguments(tmp_path: Path, more: str) -> None:
    make = applied(RECIPE, RECIPE.make)
    assert make(Setting(), tmp_path / "run").arguments == {"rows": [1, 2]}
    found = make(changed(Setting(), more), tmp_path / "run")
    assert found.arguments == {"rows": [1, 2, tmp_path.name]}
    assert (type(found).__name__, type(found).__module__) == ("Trainer", Trainer.__module__)


def test_a_subclass_of_the_user_is_changed_and_what_his_recipe_makes_is_not(tmp_path: Path, more: str) -> None:
    setting = changed(Setting(), more)
    own = applied(RECIPE, functools.partial(RECIPE.make, trainer_class=Own))(setting, tmp_path / "run")
    assert isinstance(own, Own)
    assert own.arguments["rows"] == [1, 2, tmp_path.name]
    his = applied(RECIPE, lambda setting, folder: Own(rows=[3]))
    assert his(Setting(), tmp_path).arguments == {"rows": [3]}
    with pytest.raises(CannotBeAskedError):
        his(setting, tmp_path)


def test_a_changed_setting_is_another_and_says_so(more: str) -> None:
    plain = Setting(batch_size=4)
    found = changed(plain, more).but(accumulation=2)
    assert isinstance(found, Changed)
    assert str(found) == "batch_size=4 accumulation=2 and a row more"
    assert repr(found) != repr(plain.but(accumulation=2))
    assert str(changed(plain, "")) == str(plain)


def test_all_that_a_claim_names_is_there() -> None:
    tables: dict[str, Mapping[str, Any]] = {
        "form": forms.FORMS,
        "images": HELD,
        "architecture": ARCHITECTURES,
        "by_hand": FORMULAS,
        "change": CHANGES,
    }
    used = set()
    for recipe in RECIPES.values():
        for relation in RELATIONS.values():
            for claim in relation.claims(recipe):
                for setting in claim.settings:
                    for field, table in tables.items():
                        name = getattr(setting, field, "")
                        assert not name or name in table, f"{recipe.name}: {claim}: {name}"
                        used.add(name)
    assert used >= CHANGES.keys() >= NEEDS.keys()
    assert used >= {name for name in forms.FORMS if forms.FORMS[name].__module__.endswith(".texts")}


def test_a_field_that_a_config_lacks_cannot_be_asked() -> None:
    import dataclasses

    args = dataclasses.make_dataclass("Config", [("beta", float)])(0.1)
    changes.field({"args": args}, "beta", 0.5)
    assert args.beta == 0.5
    with pytest.raises(CannotBeAskedError, match="Config has no gamma"):
        changes.field({"args": args}, "gamma", 0.5)


def test_claims_that_compare_changes_compare_two() -> None:
    for recipe in RECIPES.values():
        for give in (more_of_forms.formats, more_of_forms.options, more_of_models.limits, more_of_models.adapters):
            for claim in give(recipe):
                assert len({*map(str, claim.settings)}) == len(claim.settings), str(claim)
