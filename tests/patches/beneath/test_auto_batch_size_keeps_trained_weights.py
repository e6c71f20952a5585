"""An attempt after trained steps gets one line, or the weights it began with; all other attempts are left alone."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.testing import StopConstruction, stub_trainer

import tiny

ID = "auto-batch-size-keeps-trained-weights"
MODULE = importlib.import_module("trl.trainer.base_trainer")
CLASS = getattr(MODULE, "_BaseTrainer", None) or MODULE.BaseTrainer
TARGET = f"trl.trainer.base_trainer:{CLASS.__name__}._inner_training_loop"
MEMORY = "CUDA out of memory."


class Run:
    """A trainer of two weights, the second of which is frozen. ``attempt`` is one call of the training loop."""

    def __init__(self, *, main: bool = True, auto: bool = True, **state: Any) -> None:
        self.args = SimpleNamespace(auto_find_batch_size=auto)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(1, 1, bias=False) for _ in range(2)))
        for weight in self.model.parameters():
            weight.data.fill_(1.0)
        self.model[1].weight.requires_grad_(False)
        self.optimizer = SimpleNamespace(state={})
        switches = {"is_deepspeed_enabled": False, "is_fsdp_enabled": False, **state}
        self.trainer = stub_trainer(
            CLASS, self.args, model=self.model, optimizer=self.optimizer, state="of before", **switches
        )
        self.trainer.accelerator.is_main_process = main

    def attempt(self, steps: int | None, error: str = MEMORY, batch: int = 4, checkpoint: Any = None) -> list[float]:
        """Train to this step, where this error ends the attempt. Return the weights that it began with.

        Without steps the loop does not get as far as to make its state.
        """
        begun: list[float] = []

        def train() -> None:
            begun.extend(weight.item() for weight in self.model.parameters())
            if steps is not None:
                self.trainer.state = SimpleNamespace(global_step=steps)
            for weight in self.model.parameters():
                weight.data.add_(steps or 0)
            self.optimizer.state["moments"] = steps
            raise RuntimeError(error)

        # The loop calls it first.
        self.trainer.accelerator.free_memory = train
        with pytest.raises(RuntimeError, match=error):
            self.trainer._inner_training_loop(batch_size=batch, args=self.args, resume_from_checkpoint=checkpoint)
        return begun

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


def test_a_second_attempt_is_told_how_many_steps_came_before(messages: list[str]) -> None:
    run = Run()
    run.attempt(3)
    assert messages == []
    assert run.attempt(1, batch=2) == [4.0, 4.0]
    assert messages == [
        f"{CLASS.__name__}: memory ran out after 3 steps, and auto_find_batch_size begins again with a smaller batch: "
        "from the weights and the optimizer of these steps, on the same rows. Set per_device_train_batch_size to 2, "
        "or TRL_HOTFIX_OPTIONS=auto-batch-size-keeps-trained-weights.weights=restored"
    ]
    run.attempt(0)
    assert "after 1 steps" in messages[1]


def test_a_run_that_goes_on_after_it_has_no_note_of_it() -> None:
    run = Run()
    run.attempt(3)
    before = set(vars(run.trainer))
    run.attempt(3, "another error")
    assert len(before - set(vars(run.trainer))) == 1


@pytest.mark.parametrize(
    ("first", "auto"),
    [((0, MEMORY), True), ((None, MEMORY), True), ((3, "no such file"), True), ((3, MEMORY), False)],
    ids=["first step", "before the loop", "another error", "off"],
)
@pytest.mark.parametrize("option", [None, "restored"])
def test_other_attempts_are_left_alone(messages: list[str], switch: Any, first: Any, auto: bool, option: Any) -> None:
    with switch.on(**({"weights": option} if option else {})):
        run = Run(auto=auto)
        run.attempt(*first)
        begun = [weight.item() for weight in run.model.parameters()]
        assert run.attempt(0) == begun
        assert messages == []
        assert not run.acts


def test_a_resumed_run_counts_from_its_checkpoint(messages: list[str], tmp_path: Path) -> None:
    Path(tmp_path, "trainer_state.json").write_text(json.dumps({"global_step": 5}), encoding="utf-8")
    run = Run()
    run.attempt(5, checkpoint=str(tmp_path))
    run.attempt(7, checkpoint=str(tmp_path))
    assert messages == []
    run.attempt(5, checkpoint=str(tmp_path))
    assert "after 2 steps" in messages[0]


def test_the_main_process_alone_tells_it(messages: list[str]) -> None:
    run = Run(main=False)
    run.attempt(3)
    run.attempt(0)
    assert messages == []


def test_each_attempt_begins_with_the_first_weights_if_asked(messages: list[str], switch: Any) -> None:
    with switch.on(weights="restored"):
        run = Run()
        assert run.attempt(3) == [1.0, 1.0]
        # A frozen weight is not trained: what changes it is not the run.
        assert run.attempt(2) == [1.0, 4.0]
        assert run.attempt(0)[0] == 1.0
        assert messages == []


def test_the_optimizer_forgets_what_it_knew_of_them(switch: Any) -> None:
    run = Run()
    run.attempt(3)
    states: list[Any] = []
    with switch.on(weights="restored"):
        run = Run()
        run.attempt(3)

        def stop() -> None:
            states.append(dict(run.optimizer.state))
            raise StopConstruction

        run.trainer.accelerator.free_memory = stop
        with pytest.raises(StopConstruction):
            run.trainer._inner_training_loop(batch_size=2, args=run.args)
    assert states == [{}]


@pytest.mark.parametrize("name", ["is_deepspeed_enabled", "is_fsdp_enabled"])
def test_weights_that_are_in_shards_are_told_of(messages: list[str], switch: Any, name: str) -> None:
    with switch.on(weights="restored"):
        run = Run(**{name: True})
        run.attempt(3)
        assert run.attempt(0) == [4.0, 4.0]
    assert len(messages) == 1


def test_without_the_patch_nothing_is_told(messages: list[str], switch: Any) -> None:
    with switch.off():
        run = Run()
        run.attempt(3)
        assert run.attempt(0) == [4.0, 4.0]
    assert messages == []
