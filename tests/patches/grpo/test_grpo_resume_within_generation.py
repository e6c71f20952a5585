"""A resumed run goes on within its generation: it uses the prompts, and the parts, of a run without a stop."""

from __future__ import annotations

import importlib
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer
from transformers.trainer_callback import TrainerState

from trl_hotfix.authoring import module_of
from trl_hotfix.testing import default_arguments, metrics_by_mode, stub_trainer, trainer_and_config

import tiny

ID = "grpo-resume-within-generation"
Part = tuple[int, int]
"""The prompt that a generation was made for, and which part of the generation."""

EVERY = 24
"""Micro-batches of an epoch."""


class Run:
    """A trainer whose dataloader repeats each prompt for the micro-batches of one generation."""

    def __init__(
        self,
        method: str,
        *,
        parts: int = 2,
        iterations: int = 1,
        accumulated: int = 2,
        stop: int = 0,
        loader: Any = range(EVERY),
        **settings: Any,
    ) -> None:
        module = importlib.import_module(f"trl.trainer.{method.lower()}_trainer")
        trainer_class, config_class = trainer_and_config(module, method)
        if "_step" not in inspect.unwrap(trainer_class._prepare_inputs).__code__.co_names:
            pytest.skip("this trainer keeps no generation for several micro-batches")
        has_parts = "steps_per_generation" in config_class.__dataclass_fields__
        if parts != accumulated and not has_parts:
            pytest.skip("in this release a generation has as many parts as a step has micro-batches")
        self.parts, self.generation, self.prompt, self.used = parts, parts * iterations, -1, list[Part]()
        counts_itself = module_of(trainer_class.training_step) is module

        def train(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            step = trainer._step
            prepared = trainer._prepare_inputs(inputs)
            if counts_itself:  # RLOO of 0.26 counts in _prepare_inputs too, which is another bug.
                trainer._step = step
            (place,) = (place for place, part in enumerate(trainer._buffered_inputs) if part is prepared)
            self.used.append((self.prompt, place))
            return (model, inputs, num_items_in_batch)

        # It comes before transformers' own in the method resolution order.
        parent = type("Parent", (Trainer,), {"training_step": train})
        of_parts = {"steps_per_generation": parts} if has_parts else {}
        self.trainer = stub_trainer(
            type(trainer_class.__name__, (trainer_class, parent), {}),
            default_arguments(
                config_class,
                num_iterations=iterations,
                gradient_accumulation_steps=accumulated,
                report_to=[],
                **{**of_parts, **settings},
            ),
            model=SimpleNamespace(training=True),
            control=SimpleNamespace(should_evaluate=False),
            state=TrainerState(global_step=stop),
            callback_handler=SimpleNamespace(train_dataloader=loader),
            current_gradient_accumulation_steps=accumulated,
            _generate_and_score_completions=self.generated,
            _metrics=metrics_by_mode(),
            _current_train_step_time=0.0,
            _step=0,
            _buffered_inputs=None,
        )
        name = "training_step" if counts_itself else "_prepare_inputs"
        self.target = f"{module.__name__}:{trainer_class.__name__}.{name}"

    def generated(self, prompts: list[int]) -> dict[str, Any]:
        self.prompt = prompts[0]
        return {"prompt_ids": torch.arange(self.parts)[:, None]}

    def train(self, begin: int, count: int = 2 * EVERY // 3) -> list[Part]:
        """Train on micro-batches from this one of the epoch on. Return the parts that were used."""
        self.used.clear()
        for number in range(begin, begin + count):
            inputs = [number // self.generation]
            assert self.trainer.training_step("model", inputs, 1) == ("model", inputs, 1)
        return list(self.used)

    def without_a_stop(self, begin: int, count: int = 2 * EVERY // 3) -> list[Part]:
        return [(number // self.generation, number % self.parts) for number in range(begin, begin + count)]

    def as_if_a_generation_began(self, begin: int, count: int = 2 * EVERY // 3) -> list[Part]:
        made = [begin + number - number % self.generation for number in range(count)]
        return [(made[number] // self.generation, number % self.parts) for number in range(count)]

    def evaluate(self) -> None:
        self.trainer.model.training, self.trainer.control.should_evaluate = False, True
        self.trainer._prepare_inputs([-1])
        self.trainer.model.training, self.trainer.control.should_evaluate = True, False

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


def stream() -> Any:
    """Return a dataloader that has no length."""
    return iter(range(EVERY))


each_method = pytest.mark.parametrize("method", ["GRPO", "RLOO"])
WITHIN: list[tuple[dict[str, Any], int]] = [
    ({"iterations": 2, "stop": 1}, 2),
    ({"iterations": 3, "stop": 2}, 4),
    ({"parts": 4, "stop": 1}, 2),
    ({"parts": 4, "iterations": 2, "stop": 3}, 6),
    ({"parts": 3, "accumulated": 1, "stop": 2}, 2),
    ({"parts": 1, "accumulated": 1, "iterations": 2, "stop": 5}, 5),
    ({"parts": 1, "accumulated": 3, "iterations": 2, "stop": 1}, 3),
    # An epoch of 24 micro-batches has 12 steps, and one of 7 has 4: the last of them is shorter.
    ({"iterations": 2, "stop": 13}, 2),
    ({"iterations": 2, "stop": 5, "loader": range(7)}, 2),
    ({"iterations": 2, "stop": 13, "loader": stream}, 26),
]
"""Runs that stop within a generation, and the micro-batches that the dataloader then skips."""

within = pytest.mark.parametrize(("settings", "skipped"), WITHIN, ids=str)


def resumed(method: str, settings: dict[str, Any]) -> Run:
    made = {name: value() if value is stream else value for name, value in settings.items()}
    return Run(method, **made)


@each_method
@within
def test_a_resumed_run_goes_on_like_one_without_a_stop(method: str, settings: dict[str, Any], skipped: int) -> None:
    run = resumed(method, settings)
    assert run.train(skipped) == run.without_a_stop(skipped)
    assert run.trainer._step == skipped + len(run.used)
    assert run.acts == 1


@each_method
def test_trl_begins_a_generation_at_the_stop(method: str, switch: Any) -> None:
    with switch.off():
        for settings, skipped in WITHIN:
            if method == "RLOO" or settings.get("parts", 2) == settings.get("accumulated", 2):
                run = resumed(method, settings)
                used = run.train(skipped)
                assert used == run.as_if_a_generation_began(skipped) != run.without_a_stop(skipped)


@each_method
@pytest.mark.parametrize(
    ("settings", "skipped"),
    [
        ({"iterations": 2}, 0),
        ({"iterations": 2, "stop": 2}, 4),
        ({"parts": 4, "stop": 4}, 8),
        ({"stop": 1}, 2),
        ({"iterations": 2, "stop": 12}, 0),
        ({"iterations": 2, "stop": 1, "ignore_data_skip": True}, 0),
    ],
    ids=["a new run", "the end of iterations", "the end of parts", "one step", "the end of an epoch", "data skipped"],
)
def test_a_run_at_the_beginning_of_a_generation_is_left_alone(
    method: str, settings: dict[str, Any], skipped: int
) -> None:
    run = resumed(method, settings)
    assert run.train(skipped) == run.without_a_stop(skipped)
    assert run.trainer._step == len(run.used)
    assert run.acts == 0


@each_method
@pytest.mark.parametrize("stop", [0, 1, 2])
@pytest.mark.parametrize("left", [1, 2, 5])
def test_a_second_training_does_not_begin_with_what_the_first_has_left(method: str, left: int, stop: int) -> None:
    run = Run(method, iterations=2)
    run.train(0, left)
    run.trainer.state = TrainerState(global_step=stop)
    assert run.train(2 * stop) == run.without_a_stop(2 * stop)
    assert run.acts == 1


@each_method
def test_a_second_training_after_whole_generations_is_left_alone(method: str) -> None:
    run = Run(method, iterations=2)
    run.train(0, 8)
    run.trainer.state = TrainerState()
    assert run.train(0) == run.without_a_stop(0)
    assert run.acts == 0
    assert run.trainer._step == 8 + len(run.used)


@each_method
def test_training_goes_on_after_the_state_has_moved(method: str) -> None:
    run = Run(method, iterations=2, stop=1)
    for begin in range(2, 12):
        run.trainer.state.global_step = begin // 2
        assert run.train(begin, 1) == run.without_a_stop(begin, 1)
    assert run.acts == 1


@each_method
def test_each_trainer_goes_on_within_its_own_generation(method: str) -> None:
    first, second = Run(method, iterations=2, stop=1), Run(method, iterations=3, stop=2)
    for number in range(6):
        assert first.train(2 + number, 1) == first.without_a_stop(2 + number, 1)
        assert second.train(4 + number, 1) == second.without_a_stop(4 + number, 1)
    assert first.acts == second.acts == 1


@each_method
def test_a_run_that_evaluates_first_goes_on_within_its_generation(method: str) -> None:
    run = Run(method, iterations=2, stop=1)
    run.evaluate()
    assert run.train(2, 3) == run.without_a_stop(2, 3)
    before = run.prompt
    run.evaluate()
    run.prompt = before
    assert run.train(5) == run.without_a_stop(5)
