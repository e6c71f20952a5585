"""A resumed run has the reference model of the run without a stop, or the initial one and a warning."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

try:
    from trl.trainer.callbacks import SyncRefModelCallback
except ImportError:  # 0.9.6
    from trl.trainer.utils import SyncRefModelCallback

from trl_hotfix.authoring import shadowed
from trl_hotfix.testing import recorded_warnings

import tiny

MODULE = sys.modules[SyncRefModelCallback.__module__]
ID = "sync-ref-model-lost-on-resume"


class Callback(SyncRefModelCallback):
    """A user's, with methods of its own for the beginning of a training and for what transformers has saved."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.told: list[str] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.told.append(f"begin {state.global_step}")
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.told.append(f"save {state.global_step}")
        return control


class Model(torch.nn.Module):
    def __init__(self, size: int = 2) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(size))


class Run:
    """The callback in a run that is resumed after the step ``begin``, and saves checkpoints after steps 1 and 3.

    The policy's weight is 1 + step / 10, and the reference begins with 1. It is synchronized after steps 2 and 4.
    """

    def __init__(
        self,
        folder: Path,
        *,
        begin: int = 0,
        end: int = 5,
        alpha: float = 0.5,
        scale: float = 1.0,
        size: int = 2,
        is_sharded: bool = False,
        has_reference: bool = True,
        is_teacher: bool = False,
        **arguments: Any,
    ) -> None:
        settings: dict[str, Any] = {"output_dir": str(folder), "should_save": True}
        if not is_teacher:
            settings |= {"ref_model_sync_steps": 2, "ref_model_mixup_alpha": alpha}
        args, control, policy, reference = SimpleNamespace(**settings | arguments), object(), Model(), Model(size)
        if is_sharded:
            # As DeepSpeed marks parameters under ZeRO-3.
            reference.weight.ds_id = 0
        self.weights, answers = reference.weight.detach(), []
        no_deepspeed = SimpleNamespace(deepspeed_plugin=None)
        with (
            recorded_warnings() as self.warnings,
            tiny.counted(ID) as count,
            shadowed(MODULE, "AcceleratorState", lambda: no_deepspeed),
        ):
            self.callback = Callback(ref_model=reference if has_reference else None, accelerator=None)
            for step in range(begin, end + 1):
                policy.weight.data.fill_(scale * (1 + step / 10))
                state = SimpleNamespace(global_step=step)
                event = self.callback.on_train_begin if step == begin else self.callback.on_step_end
                answers.append(event(args, state, control, model=policy))
                if begin < step and step in (1, 3):
                    Path(folder, f"checkpoint-{step}").mkdir(parents=True, exist_ok=True)
                    answers.append(self.callback.on_save(args, state, control, model=policy))
        self.answers, self.acts = answers.count(control), count().acted

    @property
    def reference(self) -> float:
        return float(self.weights[0])


IN_STEP_4 = (1.1 + 1.4) / 2
"""The reference after a run without a stop: 1.1 in step 2, half-way to the policy, and then half-way to 1.4."""


def close(expected: float) -> Any:
    return pytest.approx(expected, abs=1e-6)


def test_a_resumed_run_has_the_reference_of_a_run_without_a_stop(tmp_path: Path) -> None:
    whole = Run(tmp_path)
    assert (whole.reference, whole.warnings, whole.acts) == (close(IN_STEP_4), [], 0)
    for _ in range(2):
        resumed = Run(tmp_path, begin=3)
        assert resumed.weights.equal(whole.weights)
        assert (resumed.warnings, resumed.acts) == ([], 1)


def test_it_has_it_before_its_first_step(tmp_path: Path) -> None:
    Run(tmp_path)
    assert Run(tmp_path, begin=3, end=3).reference == close(1.1)


def test_it_finds_it_in_the_checkpoint_that_the_arguments_name(tmp_path: Path) -> None:
    whole = Run(tmp_path / "here")
    checkpoint = str(tmp_path / "here" / "checkpoint-3")
    resumed = Run(tmp_path / "other", begin=3, resume_from_checkpoint=checkpoint)
    assert resumed.weights.equal(whole.weights)
    assert resumed.warnings == []


def test_trl_goes_on_with_the_initial_reference(tmp_path: Path, switch: Any) -> None:
    with switch.off():
        Run(tmp_path)
        assert Run(tmp_path, begin=3, end=3).reference == close(1.0)
        assert Run(tmp_path, begin=3).reference == close(1.2)


def test_a_second_run_in_the_same_folder_begins_with_the_initial_reference(tmp_path: Path) -> None:
    for _ in range(2):
        run = Run(tmp_path)
        assert (run.reference, run.warnings, run.acts) == (close(IN_STEP_4), [], 0)


def test_a_run_that_is_resumed_before_the_reference_moved_needs_none(tmp_path: Path) -> None:
    resumed = Run(tmp_path, begin=1, end=1)
    assert (resumed.reference, resumed.warnings, resumed.acts) == (close(1.0), [], 0)


def test_a_whole_copy_of_the_policy_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    Run(tmp_path, alpha=1)
    resumed = Run(tmp_path, begin=3, end=3, alpha=1)
    assert (resumed.reference, resumed.warnings) == (close(1.2), [])


def test_after_a_step_that_synchronizes_a_whole_copy_is_the_policy(tmp_path: Path) -> None:
    resumed = Run(tmp_path, begin=4, end=4, alpha=1)
    assert (resumed.reference, resumed.warnings, resumed.acts) == (close(1.4), [], 1)


LOST: dict[str, tuple[dict[str, Any], float]] = {
    "no reference": ({"begin": 3}, 1.2),
    "in a step that synchronizes": ({"begin": 2, "end": 2}, 1.0),
    "alpha is 1": ({"begin": 3, "end": 3, "alpha": 1}, 1.0),
    "a teacher": ({"begin": 1, "end": 1, "is_teacher": True}, 1.0),
}


@pytest.mark.parametrize(("run", "reference"), LOST.values(), ids=LOST)
def test_without_a_reference_it_goes_on_with_the_initial_one_and_a_warning(
    run: dict[str, Any], reference: float, tmp_path: Path
) -> None:
    Run(tmp_path, should_save=False)
    assert list(tmp_path.glob("*/*")) == []
    resumed = Run(tmp_path, **run)
    assert resumed.reference == close(reference)
    assert [f"step {run['begin']}" in message for message in resumed.warnings] == [True]
    assert resumed.acts == 0


@pytest.mark.parametrize("other", [{"scale": 2.0}, {"size": 3}], ids=["other weights", "another shape"])
def test_a_reference_that_does_not_belong_to_the_run_is_left(other: dict[str, Any], tmp_path: Path) -> None:
    Run(tmp_path)
    resumed = Run(tmp_path, begin=3, end=3, **other)
    assert (resumed.reference, len(resumed.warnings), resumed.acts) == (close(1.0), 1, 0)


def test_a_sharded_reference_is_not_kept_and_one_warning_says_so(tmp_path: Path) -> None:
    whole = Run(tmp_path, is_sharded=True)
    assert (whole.reference, len(whole.warnings)) == (close(IN_STEP_4), 1)
    assert "each rank has only a part" in whole.warnings[0]
    assert list(tmp_path.glob("*/*")) == []
    resumed = Run(tmp_path, begin=3, is_sharded=True)
    assert (resumed.reference, len(resumed.warnings)) == (close(1.2), 1)


def test_the_reference_of_a_teacher_is_kept_too(tmp_path: Path) -> None:
    Run(tmp_path)
    begun = Run(tmp_path, end=0, is_teacher=True)
    assert (begun.reference, begun.warnings) == (close(1.0), [])
    resumed = Run(tmp_path, begin=3, end=3, is_teacher=True)
    assert (resumed.reference, resumed.warnings) == (close(1.1), [])


def test_without_a_reference_model_nothing_is_kept_or_looked_for(tmp_path: Path) -> None:
    for begin in (0, 3):
        assert Run(tmp_path, begin=begin, has_reference=False).warnings == []
    assert list(tmp_path.glob("*/*")) == []


def test_the_callbacks_own_methods_are_called_and_answer(tmp_path: Path) -> None:
    whole = Run(tmp_path)
    assert (whole.callback.told, whole.answers) == (["begin 0", "save 1", "save 3"], 3)
    resumed = Run(tmp_path, begin=3)
    assert (resumed.callback.told, resumed.answers) == (["begin 3"], 1)
