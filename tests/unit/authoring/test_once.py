"""What is done once for each trainer."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest

from trl_hotfix.authoring import Once, WarnOnce


@dataclass
class Trainer:
    """It cannot be hashed, and is equal to each of its class."""


def test_each_trainer_has_a_first_time() -> None:
    first_time, one, other = Once(), Trainer(), Trainer()
    assert [first_time(trainer) for trainer in (one, other, one, copy.copy(one), other)] == [
        *(True, True),
        *(False, True, False),
    ]


def test_two_questions_are_apart() -> None:
    warned, counted, trainer = Once(), Once(), Trainer()
    assert [warned(trainer), counted(trainer), warned(trainer)] == [True, True, False]


def test_each_trainer_is_warned_once_by_each_warning(caplog: pytest.LogCaptureFixture) -> None:
    one_warning, other_warning, trainer = WarnOnce(), WarnOnce(), Trainer()
    for each in (trainer, Trainer(), trainer):
        one_warning(each, "%s rows of %d", "all", 3)
    other_warning(trainer, "another")
    assert [(record.name, record.levelname, record.getMessage()) for record in caplog.records] == [
        ("trl_hotfix", "WARNING", "all rows of 3"),
        ("trl_hotfix", "WARNING", "all rows of 3"),
        ("trl_hotfix", "WARNING", "another"),
    ]
