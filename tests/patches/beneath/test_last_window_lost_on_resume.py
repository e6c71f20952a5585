"""One line says that a resumed epoch loses its last step, and none is written where it does not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.call import Call
from trl_hotfix.patches.beneath.last_window_lost_on_resume import warn_of_the_last_step
from trl_hotfix.testing import recorded_warnings
from trl_hotfix.witness import Count


class Loader:
    def __init__(self, micro_batches: int) -> None:
        self.micro_batches = micro_batches

    def __len__(self) -> int:
        return self.micro_batches


def trainer_of(loader: Any, at: int, steps: int, *, accumulated: int = 4, skips: bool = True, main: bool = True) -> Any:
    return SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=accumulated, ignore_data_skip=not skips),
        state=SimpleNamespace(global_step=at, max_steps=steps),
        callback_handler=SimpleNamespace(train_dataloader=loader),
        accelerator=SimpleNamespace(is_main_process=main),
    )


def lines_of(trainer: Any) -> tuple[list[str], int]:
    """Resume with the wrapper, and return its lines, and whether it acted."""
    checkpoints: list[str] = []
    call, count = Call(checkpoints.append, trainer, ("folder",)), Count()
    with recorded_warnings() as lines:
        call.end(count, warn_of_the_last_step(call))
    assert checkpoints == ["folder"]
    return lines, count.acted


@pytest.mark.parametrize(
    ("micro_batches", "at", "steps", "rest"),
    [(10, 1, 3, 2), (10, 2, 3, 2), (10, 4, 9, 2), (9, 1, 3, 1), (11, 1, 3, 3), (11, 1, 4, 3)],
)
def test_a_short_last_step_is_reported(micro_batches: int, at: int, steps: int, rest: int) -> None:
    (line,), acted = lines_of(trainer_of(Loader(micro_batches), at, steps))
    assert f"has {rest} of 4 micro-batches" in line
    assert acted == 1


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        (trainer_of(Loader(12), 1, 3), "full steps"),
        (trainer_of(Loader(10), 3, 9), "the end of an epoch"),
        (trainer_of(Loader(10), 6, 9), "the end of a later epoch"),
        (trainer_of(Loader(10), 1, 2), "max_steps before the end of the epoch"),
        (trainer_of(Loader(10), 4, 5), "max_steps before the end of a later epoch"),
        (trainer_of(Loader(10), 1, 3, skips=False), "no micro-batch is skipped"),
        (trainer_of(Loader(10), 1, 10, accumulated=1), "no accumulation"),
        (trainer_of(Loader(2), 1, 1), "one step an epoch"),
        (trainer_of(object(), 1, 3), "a stream"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_runs_that_lose_no_step_get_no_line(trainer: Any, why: str) -> None:
    assert lines_of(trainer) == ([], 0), why


def test_other_processes_say_nothing() -> None:
    assert lines_of(trainer_of(Loader(10), 1, 3, main=False)) == ([], 1)
