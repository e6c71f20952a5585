"""A resumed run has the averages of the run without a stop, and begins them anew, with a warning, if it has none."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer.callbacks import BEMACallback

from trl_hotfix.testing import recorded_warnings

import tiny

ID = "bema-state-lost-on-resume"

STOP, END = 3, 6
"""The steps at which the runs are stopped and end. The averages are updated in every other step."""
WEIGHT = 3.5
"""The weight, at the beginning of a run, whose averages are compared with the formula."""

burn_in = pytest.mark.parametrize("update_after", [0, 2])


class Callback(BEMACallback):
    """A user's, with a method of its own for what transformers has saved."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.saved: list[int] = []

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.saved.append(state.global_step)
        return control


class Model(torch.nn.Module):
    def __init__(self, config: Any = None) -> None:
        super().__init__()
        self.config = config
        self.first = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.last = torch.nn.Parameter(torch.tensor([3.0, WEIGHT]))


class Run:
    """The callback in a run that is resumed after the step ``begin``, and saves a checkpoint at ``STOP``."""

    def __init__(
        self,
        folder: Path,
        *,
        update_after: int = 0,
        begin: int = 0,
        end: int = END,
        scale: float = 1.0,
        frozen: bool = False,
        **arguments: Any,
    ) -> None:
        self.args = SimpleNamespace(**{"output_dir": str(folder), "should_save": True, **arguments})
        self.model, self.stop, control = Model(), {}, SimpleNamespace()
        self.model.first.requires_grad_(not frozen)
        self.callback = Callback(update_freq=2, update_after=update_after)
        with recorded_warnings() as self.warnings, tiny.counted(ID) as count:
            for step in range(begin, end + 1):
                for name, weight in Model().named_parameters():
                    self.model.get_parameter(name).data.copy_(weight.data * scale * (1 + 0.1 * step))
                state = SimpleNamespace(global_step=step)
                event = self.callback.on_train_begin if step == begin else self.callback.on_step_end
                event(self.args, state, control, model=self.model)
                if begin < step == STOP:
                    Path(folder, f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
                    assert self.callback.on_save(self.args, state, control, model=self.model) is control
                    self.stop = self.tensors()
        self.end, self.acts = self.tensors(), count().acted

    @property
    def averaged(self) -> float:
        return float(self.end["last"][1])

    def tensors(self) -> dict[str, Any]:
        """Return a copy of all averages."""
        averaged = {name: value.detach().clone() for name, value in self.callback.running_model.named_parameters()}
        lists = (self.callback.theta0_params, self.callback.ema_params)
        return averaged | {
            f"{kind} {place}": tensor.clone()
            for kind, tensors in enumerate(lists)
            for place, tensor in enumerate(tensors)
        }


def weight_at(step: int, scale: float = 1.0) -> float:
    return WEIGHT * scale * (1 + 0.1 * step)


def averaged(update_after: int = 0, begin: int = 0, scale: float = 1.0) -> float:
    """Return the averaged weight at the end of a run whose averages begin after the step ``begin``.

    BEMA (arXiv:2508.00180): ``ema = (1 - beta) * ema + beta * weight``, and the averaged weight is
    ``ema + alpha * (weight - initial)``, with ``beta = age ** -0.5``, ``alpha = age ** -0.2`` and ``age = 10 + step``.
    """
    initial = average = result = weight_at(begin, scale)
    for step in range(begin + 1, END + 1):
        weight = weight_at(step, scale)
        if step == update_after:
            initial = average = weight
        elif step > update_after and (step - update_after) % 2 == 0:
            beta = (10 + step) ** -0.5
            average = (1 - beta) * average + beta * weight
            result = average + (10 + step) ** -0.2 * (weight - initial)
    return result


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not found[name].equal(expected[name])] == []


@burn_in
def test_a_resumed_run_has_the_averages_of_a_run_without_a_stop(tmp_path: Path, update_after: int) -> None:
    whole = Run(tmp_path, update_after=update_after)
    for _ in range(2):
        resumed = Run(tmp_path, update_after=update_after, begin=STOP)
        assert_same(resumed.end, whole.end)
        assert resumed.averaged == pytest.approx(averaged(update_after))
        assert (resumed.warnings, resumed.acts) == ([], 1)


@burn_in
def test_it_has_them_before_its_first_step(tmp_path: Path, update_after: int) -> None:
    whole = Run(tmp_path, update_after=update_after)
    assert_same(Run(tmp_path, update_after=update_after, begin=STOP, end=STOP).end, whole.stop)


@burn_in
def test_it_finds_them_in_the_checkpoint_that_the_arguments_name(tmp_path: Path, update_after: int) -> None:
    whole = Run(tmp_path / "here", update_after=update_after)
    checkpoint = str(tmp_path / "here" / f"checkpoint-{STOP}")
    resumed = Run(tmp_path / "other", update_after=update_after, begin=STOP, resume_from_checkpoint=checkpoint)
    assert_same(resumed.end, whole.end)
    assert resumed.warnings == []


@burn_in
def test_trl_begins_the_averages_with_the_weights_of_the_checkpoint(
    tmp_path: Path, update_after: int, switch: Any
) -> None:
    with switch.off():
        assert Run(tmp_path, update_after=update_after).averaged == pytest.approx(averaged(update_after))
        resumed = Run(tmp_path, update_after=update_after, begin=STOP)
    assert resumed.averaged == pytest.approx(averaged(update_after, STOP))


def test_a_run_from_the_beginning_takes_nothing_from_a_checkpoint(tmp_path: Path) -> None:
    for _ in range(2):
        run = Run(tmp_path)
        assert run.averaged == pytest.approx(averaged())
        assert (run.warnings, run.acts) == ([], 0)


def test_a_rank_that_saves_no_checkpoints_writes_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, should_save=False)
    assert (run.averaged, run.warnings) == (pytest.approx(averaged()), [])
    assert list(tmp_path.glob("*/*")) == []


def test_without_averages_it_begins_anew_with_a_warning(tmp_path: Path) -> None:
    resumed = Run(tmp_path, begin=STOP)
    assert resumed.averaged == pytest.approx(averaged(begin=STOP))
    assert ["step 3" in message for message in resumed.warnings] == [True]
    assert resumed.acts == 0


def test_averages_that_were_written_with_other_weights_are_left(tmp_path: Path) -> None:
    Run(tmp_path)
    resumed = Run(tmp_path, begin=STOP, scale=1.5)
    assert resumed.averaged == pytest.approx(averaged(begin=STOP, scale=1.5))
    assert len(resumed.warnings) == 1


def test_averages_of_other_parameters_are_left(tmp_path: Path) -> None:
    Run(tmp_path)
    resumed = Run(tmp_path, begin=STOP, end=STOP, frozen=True)
    assert resumed.averaged == pytest.approx(weight_at(STOP))
    assert len(resumed.warnings) == 1


def test_the_callbacks_own_method_is_called_after_each_save(tmp_path: Path) -> None:
    assert Run(tmp_path).callback.saved == [STOP]
    assert Run(tmp_path, begin=STOP).callback.saved == []


def test_a_second_training_goes_on_with_the_first_averages(tmp_path: Path) -> None:
    run = Run(tmp_path, end=STOP)
    with recorded_warnings() as warnings:
        run.callback.on_train_begin(run.args, SimpleNamespace(global_step=STOP), None, model=run.model)
    assert warnings == []
    assert float(run.callback.theta0_params[1][1]) == WEIGHT


def test_a_stand_in_for_a_trainer_may_have_no_state(tmp_path: Path) -> None:
    callback = Callback()
    with recorded_warnings() as warnings:
        callback.on_train_begin(None, None, None, model=Model())
    assert (warnings, float(callback.running_model.last[1])) == ([], WEIGHT)
