"""The arguments have the loss type of the option before GRPO reads them, and a line in the log says so."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from trl.trainer import grpo_trainer

DEFAULT = grpo_trainer.GRPOConfig.__dataclass_fields__["loss_type"].default
CHOICES = [("sequence", "grpo"), ("global", DEFAULT)]


class ReadError(Exception):
    """Raised where the constructor first reads its arguments, or makes some."""


class Arguments:
    """Arguments of which only the loss type can be read."""

    def __init__(self, loss_type: str) -> None:
        self.loss_type = loss_type

    def __getattr__(self, name: str) -> Any:
        raise ReadError(name)


@pytest.fixture(params=CHOICES, ids=lambda choice: choice[0])
def choice(request: pytest.FixtureRequest, switch: Any) -> Iterator[tuple[str, str]]:
    """Return the option that is on, and the loss type that it stands for."""
    with switch.on(normalisation=request.param[0]):
        yield request.param


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """Return a function that gives level and text of what the wrapper has logged."""
    with caplog.at_level(logging.INFO, "trl_hotfix"):
        yield lambda: [
            (record.levelname, record.getMessage())
            for record in caplog.records
            if record.getMessage().startswith("normalisation=")
        ]


def begin(arguments: Arguments | None) -> None:
    """Have TRL's constructor come to its arguments."""
    with pytest.raises(ReadError):
        grpo_trainer.GRPOTrainer("no model", [], args=arguments)


def test_each_trainer_reads_the_loss_type_and_the_log_has_one_line(choice: tuple[str, str], lines: Any) -> None:
    normalisation, wanted = choice
    for number in range(2):
        arguments = Arguments("dr_grpo")
        begin(arguments)
        assert arguments.loss_type == wanted
        assert lines()[number:] == [("INFO", f"normalisation={normalisation}: loss_type='dr_grpo' -> {wanted!r}")]


def test_arguments_that_have_it_stay_as_they_are_without_a_line(choice: tuple[str, str], lines: Any) -> None:
    arguments = Arguments(choice[1])
    begin(arguments)
    assert arguments.loss_type == choice[1]
    assert not lines()


@pytest.mark.parametrize("loss_type", ["cispo", "sapo"])
def test_another_algorithm_stays_as_it_is_and_warns(choice: tuple[str, str], lines: Any, loss_type: str) -> None:
    arguments = Arguments(loss_type)
    begin(arguments)
    assert arguments.loss_type == loss_type
    assert lines() == [("WARNING", f"normalisation={choice[0]} does nothing for loss_type={loss_type!r}")]


def test_a_trainer_without_arguments_warns(
    choice: tuple[str, str], lines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_arguments(*args: Any, **settings: Any) -> None:
        raise ReadError("GRPOConfig")

    monkeypatch.setattr(grpo_trainer, "GRPOConfig", make_arguments)
    begin(None)
    assert lines() == [("WARNING", f"normalisation={choice[0]} does nothing for a GRPOTrainer without args")]


def test_trl_reads_the_loss_type_of_the_user(switch: Any) -> None:
    arguments = Arguments("dr_grpo")
    with switch.off():
        begin(arguments)
    assert arguments.loss_type == "dr_grpo"
