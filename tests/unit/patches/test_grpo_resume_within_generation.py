"""The trainer counts from where the dataloader is, once for each training."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers.trainer_callback import TrainerState

from trl_hotfix.call import Call
from trl_hotfix.patches.grpo import grpo_resume_within_generation as patch


class Stream:
    def __iter__(self) -> Any:
        return iter(())


class Trainer:
    """Counts its micro-batches, as TRL's does, and makes a generation when one is due or none is there."""

    def __init__(
        self, step: int, *, loader: Any = range(24), iterations: int = 2, parts: int | None = 2, accumulation: int = 2
    ) -> None:
        self.args = SimpleNamespace(gradient_accumulation_steps=accumulation, ignore_data_skip=False)
        if parts is not None:
            self.args.steps_per_generation = parts
        self.parts = parts or accumulation
        self.num_iterations = iterations
        self.callback_handler = SimpleNamespace(train_dataloader=loader)
        self.begin(step)
        self._step = 0
        self._buffered_inputs: Any = None

    def begin(self, step: int) -> None:
        """Begin a training at this step of the run: transformers makes a new state."""
        self.state = TrainerState(global_step=step)

    def prepare_inputs(self, place: int) -> int:
        """Return the place of the dataloader at which the generation was made that is used now."""
        if self._step % (self.parts * self.num_iterations) == 0 or self._buffered_inputs is None:
            self._buffered_inputs = [place]
        self._step += 1
        return self._buffered_inputs[0]

    def used(self, *places: int) -> list[int]:
        return [patch.go_on_within_the_generation(Call(self.prepare_inputs, self, (place,))) for place in places]


@pytest.fixture
def acts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counted: list[int] = []
    monkeypatch.setattr(Call, "act", lambda call: counted.append(1))
    return counted


def test_a_generation_is_made_anew_and_used_as_often_as_was_left(acts: list[int]) -> None:
    trainer = Trainer(step=3)
    assert trainer.used(6, 7, 8, 9, 10, 11, 12) == [6, 6, 8, 8, 8, 8, 12]
    assert trainer._step == 13
    assert acts == [1]


def test_parts_of_a_generation_go_on(acts: list[int]) -> None:
    trainer = Trainer(step=1, iterations=1, parts=6)
    assert trainer.used(2, 3, 4, 5, 6) == [2, 2, 2, 2, 6]
    assert acts == [1]


def test_without_parts_a_generation_is_for_one_step(acts: list[int]) -> None:
    assert Trainer(step=1, parts=None, accumulation=3).used(3, 4, 5, 6) == [3, 3, 3, 6]
    assert acts == [1]


@pytest.mark.parametrize(
    ("step", "loader", "first"),
    [
        (15, range(24), 6),
        (14, range(24), 4),
        (12, range(24), 0),
        (3, range(25), 6),
        (14, range(25), 2),
        (14, Stream(), 28),
    ],
)
def test_it_counts_from_where_the_epoch_is(step: int, loader: Any, first: int) -> None:
    trainer = Trainer(step, loader=loader, parts=6)
    trainer.used(first)
    assert trainer._step == first + 1


@pytest.mark.parametrize("settings", [{}, {"parts": None}, {"parts": 1}])
def test_a_generation_of_one_step_is_left_alone(settings: dict[str, Any], acts: list[int]) -> None:
    trainer = Trainer(step=3, iterations=1, **settings)
    trainer.used(6)
    assert trainer._step == 1
    assert acts == []


@pytest.mark.parametrize("step", [0, 2, 4])
def test_at_the_beginning_of_a_generation_nothing_changes(step: int, acts: list[int]) -> None:
    trainer = Trainer(step)
    assert trainer.used(2 * step, 2 * step + 1) == [2 * step, 2 * step]
    assert trainer._step == 2
    assert acts == []


def test_data_that_are_not_skipped_begin_with_a_generation(acts: list[int]) -> None:
    trainer = Trainer(step=3)
    trainer.args.ignore_data_skip = True
    assert trainer.used(0, 1, 2, 3, 4) == [0, 0, 0, 0, 4]
    assert acts == []


def test_a_second_training_does_not_begin_with_what_is_buffered(acts: list[int]) -> None:
    trainer = Trainer(step=0)
    trainer.used(0, 1)
    trainer.begin(0)
    assert trainer.used(100, 101, 102, 103, 104) == [100, 100, 100, 100, 104]
    assert acts == [1]


def test_a_second_training_that_goes_on_at_the_same_place_generates_anew(acts: list[int]) -> None:
    trainer = Trainer(step=1)
    trainer.used(2, 3, 4, 5)
    trainer.begin(3)
    assert trainer.used(6, 7, 8) == [6, 6, 8]
    assert acts == [1, 1]


def test_another_trainer_has_its_own_place() -> None:
    one, other = Trainer(step=1), Trainer(step=3)
    assert one.used(2) == [2]
    assert other.used(6) == [6]
    assert (one._step, other._step) == (3, 7)
