"""The order of a resumed epoch is its own, on one rank and on several; other runs have the order that they had."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from torch.utils.data import RandomSampler, SequentialSampler
from transformers import TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "resume-replays-epoch-0-order"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.name: target for target in gates.targets_here(PATCH)}
ROWS = list(range(16))


@pytest.fixture(scope="module", autouse=True)
def one_process() -> None:
    PartialState(cpu=True)


class Run:
    """A trainer whose state is at this epoch, and its loader, as accelerate makes it for one of several ranks."""

    def __init__(
        self, target: Any, epoch: float | None, *, ranks: int = 1, rank: int = 0, seedable: bool = True, **state: Any
    ) -> None:
        self.target, sampler = target, RandomSampler if seedable else SequentialSampler
        self.trainer = stub_trainer(
            getattr(import_module(target.module), target.attribute.partition(".")[0]),
            default_arguments(TrainingArguments, process_index=0, precompute_ref_log_probs=False),
            train_dataset=ROWS,
            data_collator=list,
            state=SimpleNamespace(epoch=epoch),
            _train_batch_size=2,
            _get_train_sampler=lambda *args: sampler(ROWS),
            _get_collator_with_removed_columns=lambda collator, description: collator,
            **{"is_in_train": True, **state},
        )
        self.trainer.accelerator.prepare = lambda loader: prepare_data_loader(
            loader, num_processes=ranks, process_index=rank, use_seedable_sampler=True, put_on_device=False
        )
        torch.manual_seed(42)
        self.loader = self.trainer.get_train_dataloader()

    def epoch(self, number: int) -> list[Any]:
        """Train an epoch from its beginning."""
        self.trainer.state.epoch = float(number)
        self.loader.set_epoch(number)
        return list(self.loader)

    def rest(self, number: int, skipped: int) -> list[Any]:
        """Train an epoch after the batches that are skipped."""
        self.loader.set_epoch(number)
        return list(skip_first_batches(self.loader, skipped))

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target.name, self.trainer)


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Any:
    return TARGETS[request.param]


@pytest.mark.parametrize("place", [(1, 0), (2, 0), (2, 1)], ids=str)
def test_a_resumed_epoch_and_those_after_it_have_their_own_order(target: Any, place: tuple[int, int]) -> None:
    ranks, rank = place
    whole = Run(target, None, ranks=ranks, rank=rank)
    orders = [whole.epoch(number) for number in range(4)]
    assert len({str(order) for order in orders}) == 4
    assert not whole.acts
    for number in (1, 2):
        run = Run(target, number + 0.25, ranks=ranks, rank=rank)
        assert run.rest(number, 2) == orders[number][2:]
        assert run.acts == 1
        assert [run.epoch(later) for later in range(number + 1, 4)] == orders[number + 1 :]


def test_accelerate_alone_takes_the_order_of_the_first_epoch(target: Any, switch: Any) -> None:
    with switch.off():
        first = Run(target, None).epoch(0)
        assert Run(target, 1.25).rest(1, 2) == first[2:]


def test_a_run_that_is_resumed_in_its_first_epoch_is_left_alone(target: Any, switch: Any) -> None:
    run = Run(target, 0.25)
    found = run.rest(0, 2)
    assert not run.acts
    with switch.off():
        assert Run(target, 0.25).rest(0, 2) == found


@pytest.mark.parametrize("state", [{"is_in_train": False}, {"seedable": False}], ids=["no training", "in order"])
def test_other_loaders_are_left_alone(target: Any, switch: Any, state: dict[str, Any]) -> None:
    run = Run(target, 1.25, **state)
    found = run.rest(1, 2)
    assert not run.acts
    with switch.off():
        assert Run(target, 1.25, **state).rest(1, 2) == found


def test_a_loader_without_batches_is_returned_as_it_is(target: Any) -> None:
    trainer = Run(target, 1.25).trainer
    trainer.accelerator.prepare = lambda loader: "a loader"
    assert trainer.get_train_dataloader() == "a loader"
