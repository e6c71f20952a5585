"""All micro-batches of an epoch are fetched, in as many steps as they need; full steps and set limits stay."""

from __future__ import annotations

import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "epoch-tail-lost"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
CLASSES = {target.attribute.partition(".")[0]: target.module for target in gates.targets_here(PATCH)}


class Loader(SimpleNamespace):
    """A loader of so many micro-batches of two rows."""

    def __init__(self, length: int) -> None:
        super().__init__(dataset=range(2 * length), length=length)

    def __len__(self) -> int:
        return int(self.length)


@pytest.fixture(params=list(CLASSES))
def name(request: pytest.FixtureRequest) -> str:
    """Each trainer of this release whose loop is transformers'."""
    return str(request.param)


def trainer_of(name: str, of_a_step: int = 8, **settings: Any) -> Any:
    defaults = {"num_train_epochs": 1.0, "max_steps": -1, "n_gpu": 0, "average_tokens_across_devices": False}
    args = default_arguments(TrainingArguments, gradient_accumulation_steps=of_a_step, **{**defaults, **settings})
    return stub_trainer(getattr(import_module(CLASSES[name]), name), args, model_accepts_loss_kwargs=False)


def counted(trainer: Any, loader: Any) -> tuple[Any, ...]:
    result: tuple[Any, ...] = trainer.set_initial_training_values(trainer.args, loader, 16)
    return result


def fetched(trainer: Any, left: int, asked: int) -> int:
    batches, _ = trainer.get_batch_samples(iter([{"input_ids": None}] * left), asked, "cpu")
    return len(batches)


def acts(name: str, method: str, trainer: Any) -> int | None:
    return tiny.acts(ID, f"{CLASSES[name]}:{name}.{method}", trainer)


@pytest.mark.parametrize(("left", "asked"), [(6, 4), (6, 1), (6, 7), (2, 4), (1, 1), (7, 0)])
def test_the_last_step_gets_what_the_epoch_has_left(name: str, left: int, asked: int) -> None:
    trainer = trainer_of(name)
    assert fetched(trainer, left, asked) == left
    assert acts(name, "get_batch_samples", trainer) == 1


def test_a_step_gets_no_more_than_its_own(name: str) -> None:
    trainer = trainer_of(name)
    assert [fetched(trainer, 20, asked) for asked in (8, 4)] == [8, 8]
    assert acts(name, "get_batch_samples", trainer) == 1


def test_a_whole_step_is_asked_for_as_before(name: str) -> None:
    trainer = trainer_of(name)
    assert fetched(trainer, 30, 8) == 8
    assert not acts(name, "get_batch_samples", trainer)


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 4), (10.0, 40), (0.5, 2), (2.5, 10)])
def test_the_steps_of_an_epoch_are_rounded_up(name: str, epochs: float, steps: int) -> None:
    trainer = trainer_of(name, num_train_epochs=epochs)
    found = counted(trainer, Loader(30))
    assert found == (math.ceil(epochs), 4, 60, 60 * epochs, True, 30, steps)
    assert acts(name, "set_initial_training_values", trainer) == 1


def test_a_number_of_steps_that_is_set_stays_and_takes_fewer_epochs(name: str) -> None:
    trainer = trainer_of(name, max_steps=12)
    assert counted(trainer, Loader(30)) == (3, 4, 60, 192, False, 30, 12)


@pytest.mark.parametrize(("length", "of_a_step"), [(32, 8), (30, 1), (5, 8), (8, 8)])
def test_epochs_of_full_steps_or_of_less_than_one_are_counted_as_before(
    name: str, switch: Any, length: int, of_a_step: int
) -> None:
    trainer = trainer_of(name, of_a_step)
    found = counted(trainer, Loader(length))
    assert not acts(name, "set_initial_training_values", trainer)
    with switch.off():
        assert counted(trainer_of(name, of_a_step), Loader(length)) == found


def test_a_stream_is_counted_as_before(name: str, switch: Any) -> None:
    trainer = trainer_of(name, max_steps=12)
    found = counted(trainer, object())
    assert not acts(name, "set_initial_training_values", trainer)
    with switch.off():
        assert counted(trainer_of(name, max_steps=12), object()) == found


def test_transformers_alone_loses_the_rest(name: str, switch: Any) -> None:
    with switch.off():
        trainer = trainer_of(name)
        assert fetched(trainer, 6, 4) == 4
        assert counted(trainer, Loader(30))[-1] == 3
