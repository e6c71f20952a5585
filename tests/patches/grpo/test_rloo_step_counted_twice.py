"""Every part of a generation is trained on, as often as ``num_iterations`` says, and a step is counted once."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer
from trl.trainer import rloo_trainer

from trl_hotfix.testing import stub_trainer

import tiny

ID = "rloo-step-counted-twice"
Part = tuple[int, int]
"""The number of a generation, and which of its parts."""

STEPS = 12
sizes = pytest.mark.parametrize(("parts", "iterations"), [(1, 1), (2, 1), (3, 1), (4, 1), (1, 2), (2, 2), (3, 2)])


class Run:
    """A trainer whose generations have so many parts of two rows, each of which is for so many steps."""

    def __init__(self, parts: int, iterations: int = 1, accumulated: int = 2) -> None:
        self.parts, self.generations, self.trained = parts, 0, list[Part]()

        def train(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> str:
            self.trained.append(self.part_of(trainer._prepare_inputs(inputs)))
            return "the loss"

        # It comes before transformers' own in the method resolution order.
        parent = type("Parent", (Trainer,), {"training_step": train})
        self.trainer = stub_trainer(
            type("RLOOTrainer", (rloo_trainer.RLOOTrainer, parent), {}),
            SimpleNamespace(steps_per_generation=parts, num_iterations=iterations, report_to=[]),
            model=SimpleNamespace(training=True),
            state=SimpleNamespace(global_step=0),
            current_gradient_accumulation_steps=accumulated,
            _step=0,
            _buffered_inputs=None,
            _current_train_step_time=0.0,
            _metrics={"train": defaultdict(list)},
            _generate_and_score_completions=self.generated,
        )

    def generated(self, rows: Any) -> dict[str, Any]:
        self.generations += 1
        return {"completion_ids": torch.arange(2 * self.parts)[:, None]}

    def part_of(self, inputs: dict[str, Any]) -> Part:
        """Return which part of the newest generation these very inputs are."""
        (place,) = (place for place, part in enumerate(self.trainer._buffered_inputs) if part is inputs)
        return self.generations - 1, place

    def train(self, steps: int = STEPS) -> list[Part]:
        """Train on so many micro-batches more. Return the parts so far."""
        for _ in range(steps):
            assert self.trainer.training_step(self.trainer.model, [], 1) == "the loss"
        return self.trained

    def evaluate(self) -> dict[str, Any]:
        self.trainer.model.training = False
        inputs: dict[str, Any] = self.trainer._prepare_inputs([])
        self.trainer.model.training = True
        return inputs

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, "trl.trainer.rloo_trainer:RLOOTrainer._prepare_inputs", self.trainer)


def every_part(parts: int, iterations: int, steps: int = STEPS) -> list[Part]:
    return [(step // (parts * iterations), step % parts) for step in range(steps)]


def every_other_part(parts: int, iterations: int) -> list[Part]:
    """Return the parts if each micro-batch is counted twice."""
    counts = range(0, 2 * STEPS, 2)
    new = [count for count in counts if count % (parts * iterations) == 0]
    return [(sum(first <= count for first in new) - 1, count % parts) for count in counts]


@sizes
def test_every_part_of_a_generation_is_trained_on(parts: int, iterations: int) -> None:
    run = Run(parts, iterations)
    assert run.train() == every_part(parts, iterations)
    assert run.trainer._step == STEPS
    assert run.acts == STEPS


@sizes
def test_trl_trains_on_every_other_part(parts: int, iterations: int, switch: Any) -> None:
    with switch.off():
        run = Run(parts, iterations)
        assert run.train() == every_other_part(parts, iterations)
        assert run.trainer._step == 2 * STEPS


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_the_time_of_a_step_is_logged_once(accumulated: int) -> None:
    run = Run(4, accumulated=accumulated)
    run.train()
    assert len(run.trainer._metrics["train"]["step_time"]) == STEPS // accumulated


def test_trl_logs_the_time_of_each_micro_batch(switch: Any) -> None:
    with switch.off():
        run = Run(4)
        run.train()
    assert len(run.trainer._metrics["train"]["step_time"]) == STEPS


def test_an_evaluation_generates_and_is_not_counted() -> None:
    run = Run(2)
    run.train(3)
    acts = run.acts
    inputs = run.evaluate()
    assert inputs["completion_ids"].tolist() == [[0], [1], [2], [3]]
    assert (run.trainer._step, run.generations, run.acts) == (3, 3, acts)


def test_training_goes_on_after_an_evaluation() -> None:
    run = Run(4)
    run.train(2)
    run.evaluate()
    run.generations -= 1
    assert run.train(6) == every_part(4, 1, 8)


def test_each_trainer_counts_its_own_steps() -> None:
    first, second = Run(2), Run(4)
    for step in range(1, STEPS):
        assert first.train(1) == every_part(2, 1, step)
        assert second.train(1) == every_part(4, 1, step)


def test_a_resumed_run_generates_first_and_goes_on_with_its_part() -> None:
    run = Run(4)
    run.trainer._step = 6
    assert run.train(3) == [(0, 2), (0, 3), (1, 0)]


def test_an_error_while_completions_are_generated_is_not_counted() -> None:
    def fail(rows: Any) -> None:
        raise ArithmeticError

    run = Run(2)
    run.trainer._generate_and_score_completions = fail
    with pytest.raises(ArithmeticError):
        run.train(1)
    run.trainer._generate_and_score_completions = run.generated
    assert run.train() == every_part(2, 1)
