"""What a trainer refuses in the middle of its training, and what fails there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from trl_hotfix.relations.run import _train
from trl_hotfix.relations.setting import CannotBeAskedError


def of_module(name: str, line: str, **known: Any) -> Callable[..., Any]:
    """Return a function of a module with this name, of one line."""
    space: dict[str, Any] = {"__name__": name, **known}
    exec(compile(f"def train(*args):\n    {line}", name, "exec"), space)
    function: Callable[..., Any] = space["train"]
    return function


class Trainer:
    def __init__(self, train: Callable[..., Any]) -> None:
        self.train = train


@pytest.mark.parametrize("error", ["ValueError", "NotImplementedError"])
def test_what_trl_refuses_in_a_step_cannot_be_asked(error: str) -> None:
    with pytest.raises(CannotBeAskedError, match=f"{error}: Unknown loss type"):
        _train(Trainer(of_module("trl.trainer.dpo_trainer", f"raise {error}('Unknown loss type')")))


@pytest.mark.parametrize("module", ["torch.nn", "trl_hotfix.patches.dpo", "__main__"])
def test_a_value_error_of_another_module_that_trl_calls_is_an_error(module: str) -> None:
    inner = of_module(module, "raise ValueError('expected a tensor')")
    with pytest.raises(ValueError, match="expected a tensor"):
        _train(Trainer(of_module("trl.trainer.dpo_trainer", "inner()", inner=inner)))


def test_a_function_of_python_that_trl_calls_wrongly_is_an_error() -> None:
    with pytest.raises(ValueError, match="must not be zero"):
        _train(Trainer(of_module("trl.trainer.grpo_trainer", "range(0, 1, 0)")))


def test_other_errors_of_trl_are_errors() -> None:
    with pytest.raises(KeyError):
        _train(Trainer(of_module("trl.trainer.utils", "raise KeyError('x')")))
