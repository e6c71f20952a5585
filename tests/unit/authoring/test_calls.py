from __future__ import annotations

import functools
import sys
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix import testing
from trl_hotfix.authoring import argument, called_with, module_of, shadowed, with_config


def method(self: Any, batch: str, scale: float = 1.0, *, training: bool = True) -> tuple[Any, ...]:
    return batch, scale, training


@pytest.mark.parametrize(
    ("args", "kwargs"), [(("trainer", "batch"), {}), (("trainer",), {"batch": "batch"})], ids=["position", "name"]
)
def test_an_argument_is_read_in_both_forms(args: Any, kwargs: Any) -> None:
    assert argument(method, args, kwargs, "batch") == "batch"


def test_an_omitted_argument_has_its_default() -> None:
    assert argument(method, ("trainer", "batch"), {}, "scale") == 1.0
    assert argument(method, ("trainer", "batch"), {"training": False}, "training") is False


def test_a_shadowed_attribute_is_restored_after_an_error() -> None:
    trainer = SimpleNamespace(beta=0.1)
    with suppress(ZeroDivisionError), shadowed(trainer, "beta", 0.2):
        assert trainer.beta == 0.2
        raise ZeroDivisionError
    assert vars(trainer) == {"beta": 0.1}


def test_an_absent_attribute_is_absent_afterwards() -> None:
    class Trainer:
        beta = 0.1

    trainer = Trainer()
    with shadowed(trainer, "beta", 0.2):
        assert trainer.beta == 0.2
    assert vars(trainer) == {}


class Model:
    config: Any = None

    def __call__(self, **kwargs: Any) -> dict[str, Any]:
        return kwargs


def test_a_view_has_another_config_than_the_model() -> None:
    model = Model()
    view = with_config(model, "plain")
    assert (view.config, model.config) == ("plain", None)
    assert view(use_cache=True) == {"use_cache": True}
    assert isinstance(view, Model)


def test_a_view_changes_the_keyword_arguments_of_a_call() -> None:
    view = called_with(Model(), lambda kwargs: {**kwargs, "use_cache": False})
    assert view(labels=1, use_cache=True) == {"labels": 1, "use_cache": False}


def test_the_module_of_a_method_is_found_behind_wrappers() -> None:
    method = testing.stub_trainer

    @functools.wraps(method)
    def guard(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    del guard.__dict__["__wrapped__"]
    trainers = sys.modules["trl_hotfix.testing.trainers"]
    assert module_of(method) is trainers
    assert module_of(functools.partial(method, object)) is trainers
    assert module_of(testing.CharacterTokenizer().decode) is sys.modules["trl_hotfix.testing.tokenizers"]
    assert module_of(classmethod(method)) is trainers  # type: ignore[arg-type]
