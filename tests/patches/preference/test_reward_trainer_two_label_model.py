"""A model that is given by its name is loaded with one output, unless the user says how many it has."""

from __future__ import annotations

from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset
from trl.trainer import reward_trainer

from trl_hotfix.authoring import shadowed
from trl_hotfix.testing import StopConstruction, default_arguments

LOADER = reward_trainer.create_model_from_path
OPTIONS = [None, {}, {"dtype": "auto", "revision": "v1"}]


class Constructor:
    """Runs the real constructor until it loads a tokenizer, or a model."""

    def __init__(self) -> None:
        self.loads: list[dict[str, Any]] = []
        self.loaders: list[Any] = []

    def load(self, name: str, **options: Any) -> Any:
        self.loads.append({"name": name, **options})
        self.stop()

    def stop(self, *args: Any, **options: Any) -> Any:
        self.loaders.append(reward_trainer.create_model_from_path)
        raise StopConstruction

    def __call__(self, model: Any, options: Any = None, *, args: bool = True, by_name: bool = True) -> None:
        one_process: dict[str, Any] = {"distributed_state": SimpleNamespace(distributed_type="NO")}
        settings = default_arguments(reward_trainer.RewardConfig, model_init_kwargs=options, **one_process)
        shadows = {
            "AutoModelForSequenceClassification": SimpleNamespace(from_pretrained=self.load),
            "AutoTokenizer": SimpleNamespace(from_pretrained=self.stop),
            "RewardConfig": lambda *args, **kwargs: settings,
        }
        trainer = object.__new__(reward_trainer.RewardTrainer)
        given = {"model": model, "args": settings if args else None}
        rows = {"train_dataset": Dataset.from_dict({"text": ["a"]})}
        with pytest.MonkeyPatch.context() as patched, suppress(StopConstruction):
            for name, substitute in shadows.items():
                patched.setattr(reward_trainer, name, substitute)
            trainer.__init__(*([] if by_name else given.values()), **(given if by_name else {}), **rows)


@pytest.fixture
def construct() -> Constructor:
    return Constructor()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("by_name", [True, False])
def test_a_model_by_its_name_has_one_output(construct: Constructor, options: Any, by_name: bool) -> None:
    construct("a model", options, by_name=by_name)
    assert construct.loads == [{"name": "a model", "num_labels": 1, **loaded_without_us(options)}]


def loaded_without_us(options: Any) -> dict[str, Any]:
    """Return with what TRL loads the model, but for its name. A release may add options of its own."""
    unpatched: list[dict[str, Any]] = []

    def load(name: str, **options: Any) -> None:
        unpatched.append(options)

    LOADER("a model", SimpleNamespace(from_pretrained=load), **(options or {}))
    return unpatched[0]


def test_without_arguments_it_has_one_output_too(construct: Constructor) -> None:
    construct("a model", args=False)
    assert [load["num_labels"] for load in construct.loads] == [1]


@pytest.mark.parametrize("own", [{"num_labels": 3}, {"config": "a config"}], ids=str)
def test_what_the_user_says_stays(construct: Constructor, own: dict[str, Any]) -> None:
    construct("a model", dict(own))
    (load,) = construct.loads
    assert {name: value for name, value in load.items() if name in ("num_labels", "config")} == own
    assert construct.loaders == [LOADER]


@pytest.mark.parametrize("args", [True, False])
def test_a_model_that_is_passed_is_left_alone(construct: Constructor, args: bool) -> None:
    construct(SimpleNamespace(config=SimpleNamespace(num_labels=1, _name_or_path="a model")), args=args)
    assert construct.loads == []
    assert construct.loaders == [LOADER]


@pytest.mark.parametrize("options", [*OPTIONS, {"num_labels": 3}], ids=str)
def test_the_loader_is_put_back(construct: Constructor, options: Any) -> None:
    construct("a model", options)
    assert reward_trainer.create_model_from_path is LOADER


def test_a_loader_that_stands_there_is_called(construct: Constructor) -> None:
    called: list[str] = []

    def other(name: str, *args: Any, **options: Any) -> Any:
        called.append(name)
        return LOADER(name, *args, **options)

    with shadowed(reward_trainer, "create_model_from_path", other):
        construct("a model")
    assert called == ["a model"]
    assert [load["num_labels"] for load in construct.loads] == [1]
