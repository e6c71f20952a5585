"""Each average is written into the parameter of its own name, and TRL has its own model where none is frozen."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.callbacks import BEMACallback

import tiny

ID = "bema-callback-frozen-parameters"

STEPS = 3


class Model(torch.nn.Module):
    """A model whose order of weights is not that of their names. It counts the calls of ``parameters``."""

    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.asked = 0
        self.before, self.frozen, self.after = (
            torch.nn.Parameter(torch.tensor([start, start + 0.5])) for start in (1.0, 7.0, 3.0)
        )

    def parameters(self, recurse: bool = True) -> Any:
        self.asked += 1
        return super().parameters(recurse)


class Run:
    """A callback after three updates, with each weight before and after each step."""

    def __init__(self, frozen: Sequence[str] = ("frozen",), *, renamed: bool = False) -> None:
        model = Model()
        for name in frozen:
            model.get_parameter(name).requires_grad_(False)
        self.callback = BEMACallback(update_freq=1)
        self.callback.on_train_begin(None, None, None, model=model)
        if renamed:
            self.callback.param_names = [f"module.{name}" for name in self.callback.param_names]
        self.averaged_model = self.callback.running_model
        weights = dict(model.named_parameters())
        self.trajectories = {name: [weight.detach().clone()] for name, weight in weights.items()}
        self.errors: list[str] = []
        with tiny.counted(ID) as count:
            for step in range(1, STEPS + 1):
                for number, (name, weight) in enumerate(weights.items(), 1):
                    if weight.requires_grad:
                        weight.data = weight.data * (1 + 0.1 * step * number)
                    self.trajectories[name].append(weight.detach().clone())
                try:
                    self.callback.on_step_end(None, SimpleNamespace(global_step=step), None, model=model)
                # zip(strict=True) raises after the pairs have been written.
                except ValueError as failure:
                    self.errors.append(str(failure))
        self.acts = count().acted

    def average(self, name: str) -> Any:
        return self.averaged_model.get_parameter(name).detach()


def averaged(trajectory: Sequence[Any]) -> Any:
    """Return the averaged weight after the last step. The first of ``trajectory`` is the weight before training.

    BEMA (arXiv:2508.00180): ``ema = (1 - beta) * ema + beta * weight``, and the averaged weight is
    ``ema + alpha * (weight - initial)``, with ``beta = age ** -0.5``, ``alpha = age ** -0.2`` and ``age = 10 + step``.
    """
    ema = trajectory[0]
    for step, weight in enumerate(trajectory[1:], 1):
        beta = (10 + step) ** -0.5
        ema = (1 - beta) * ema + beta * weight
    return ema + (9 + len(trajectory)) ** -0.2 * (trajectory[-1] - trajectory[0])


@pytest.mark.parametrize("frozen", [["frozen"], ["before"], ["after"], ["before", "frozen"]], ids=" and ".join)
def test_each_average_is_in_its_own_parameter(frozen: list[str]) -> None:
    for run in (Run(frozen), Run(frozen)):
        assert run.errors == []
        for name, trajectory in run.trajectories.items():
            torch.testing.assert_close(run.average(name), averaged(trajectory))
        assert run.acts == STEPS


def test_a_frozen_parameter_keeps_its_value() -> None:
    run = Run()
    assert run.average("frozen").equal(run.trajectories["frozen"][0])


def test_the_callback_has_its_averaged_model_again() -> None:
    run = Run()
    assert run.callback.running_model is run.averaged_model
    run.callback.thetat_params = [None] * 2
    with pytest.raises(AttributeError):
        run.callback.on_step_end(None, SimpleNamespace(global_step=4), None, model=None)
    assert run.callback.running_model is run.averaged_model


@pytest.mark.parametrize("renamed", [False, True], ids=["nothing is frozen", "other names"])
def test_trl_has_its_own_model_where_the_names_say_nothing(renamed: bool) -> None:
    run = Run([], renamed=renamed)
    assert run.errors == []
    for name, trajectory in run.trajectories.items():
        torch.testing.assert_close(run.average(name), averaged(trajectory))
    assert run.averaged_model.asked == STEPS
    assert run.acts == 0


def test_names_of_another_model_are_left_to_trl_although_a_parameter_is_frozen(switch: Any) -> None:
    patched = Run(renamed=True)
    with switch.off():
        unpatched = Run(renamed=True)
    assert patched.errors == unpatched.errors
    for name in patched.trajectories:
        assert patched.average(name).equal(unpatched.average(name))


def test_trl_writes_the_averages_behind_a_frozen_parameter_into_their_neighbours(switch: Any) -> None:
    with switch.off():
        run = Run()
    torch.testing.assert_close(run.average("before"), averaged(run.trajectories["before"]))
    torch.testing.assert_close(run.average("frozen"), averaged(run.trajectories["after"]))
    assert run.average("after").equal(run.trajectories["after"][0])
    assert len(run.errors) in (0, STEPS)
    assert all("longer" in error for error in run.errors)


def test_a_peft_model_has_no_averages_at_all(tmp_path: Path) -> None:
    """TRL makes a second model from the config, and a PeftModel needs more: ``not_repaired`` says so."""
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny.llama(str(tmp_path), seed=0), LoraConfig(task_type="CAUSAL_LM", r=1))
    with pytest.raises(TypeError, match="peft_config"):
        BEMACallback().on_train_begin(None, None, None, model=model)
