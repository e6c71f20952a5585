"""The order of an epoch is that of its number, on each rank and in a resumed run; other samplers are left alone."""

from __future__ import annotations

import inspect
from collections import Counter
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from transformers import Trainer, TrainingArguments
from transformers.trainer_pt_utils import LengthGroupedSampler

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID = "group-by-length-resume-order"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.name: target for target in gates.targets_here(PATCH)}
ROWS = [{"input_ids": [5] * (1 + number % 7)} for number in range(32)]
GROUPED: dict[str, Any] = {"group_by_length": True, "train_sampling_strategy": "group_by_length"}
RANDOM: dict[str, Any] = {"group_by_length": False, "train_sampling_strategy": "random"}


class Run:
    """A trainer in this epoch, and its sampler."""

    def __init__(self, target: Any, epoch: float | None = None, rows: Any = ROWS, **settings: Any) -> None:
        self.target = target
        sizes: dict[str, Any] = {"train_batch_size": 1, "world_size": 1, "process_index": 0}
        self.trainer = stub_trainer(
            getattr(import_module(target.module), target.attribute.partition(".")[0]),
            default_arguments(TrainingArguments, **{**GROUPED, **sizes, **settings}),
            train_dataset=rows,
            processing_class=SimpleNamespace(model_input_names=["input_ids"]),
            state=SimpleNamespace(epoch=epoch),
        )
        self.sampler = self.trainer._get_train_sampler(rows)

    def order(self, epoch: float | None = None) -> list[int]:
        self.trainer.state.epoch = self.trainer.state.epoch if epoch is None else epoch
        return list(self.sampler)

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target.name, self.trainer)


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Any:
    return TARGETS[request.param]


def test_each_epoch_has_an_order_of_its_own_and_a_resumed_run_has_it_again(target: Any) -> None:
    whole = Run(target)
    orders = [whole.order(number) for number in range(3)]
    assert len({str(order) for order in orders}) == 3
    for number, order in enumerate(orders):
        assert sorted(order) == list(range(len(ROWS)))
        torch.manual_seed(number)
        assert Run(target, number + 0.75).order() == order
    assert whole.acts == 1


def test_the_first_epoch_is_that_of_a_run_without_a_state(target: Any) -> None:
    assert Run(target, None).order() == Run(target, 0.0).order()


def test_the_rest_of_an_epoch_is_what_the_checkpoint_has_left(target: Any) -> None:
    def loader(run: Run) -> Any:
        return DataLoader(range(len(ROWS)), batch_size=4, sampler=run.sampler, collate_fn=list)

    whole = list(loader(Run(target, 1.0)))
    torch.manual_seed(7)
    assert list(skip_first_batches(loader(Run(target, 1.25)), 2)) == whole[2:]


def test_ranks_share_the_rows_of_an_epoch_whatever_they_have_drawn(target: Any, switch: Any) -> None:
    def rows() -> Counter[int]:
        found: Counter[int] = Counter()
        for rank in range(2):
            torch.manual_seed(rank)
            batches = BatchSampler(Run(target, 2.0).sampler, 4, drop_last=False)
            found.update(row for batch in BatchSamplerShard(batches, 2, rank) for row in batch)
        return found

    assert rows() == Counter(range(len(ROWS)))
    with switch.off():
        assert rows() != Counter(range(len(ROWS)))


@pytest.mark.parametrize("name", ["seed", "data_seed"])
def test_another_seed_has_another_order(target: Any, name: str) -> None:
    assert Run(target, **{name: 1}).order() != Run(target, **{name: 2}).order()


def test_the_seed_of_the_data_comes_first(target: Any) -> None:
    assert Run(target, seed=1, data_seed=3).order() == Run(target, seed=2, data_seed=3).order()
    assert Run(target, seed=1, data_seed=0).order() == Run(target, seed=2, data_seed=0).order()


def test_rows_are_grouped_as_before(target: Any) -> None:
    run = Run(target, gradient_accumulation_steps=4)
    assert len(run.sampler) == len(ROWS)
    order = run.order()
    lengths = [len(ROWS[row]["input_ids"]) for row in order]
    assert lengths[0] == max(lengths)
    generator = torch.Generator().manual_seed(run.trainer.args.seed)
    assert order == list(LengthGroupedSampler(4, ROWS, generator=generator))


def test_no_random_number_of_the_process_is_drawn(target: Any) -> None:
    before = torch.random.get_rng_state()
    Run(target).order()
    assert torch.random.get_rng_state().equal(before)


def test_a_random_sampler_is_left_alone(target: Any) -> None:
    run = Run(target, **RANDOM)
    assert type(run.sampler) is RandomSampler
    run.order()
    assert not run.acts


def test_a_run_without_a_sampler_has_none(target: Any) -> None:
    run = Run(target, rows=iter(ROWS))
    assert run.sampler is None
    assert not run.acts


class _Own(LengthGroupedSampler):
    pass


@pytest.mark.parametrize(
    "own", [lambda: _Own(1, ROWS), lambda: LengthGroupedSampler(1, ROWS, generator=torch.Generator())]
)
def test_a_sampler_of_somebody_else_is_left_alone(target: Any, own: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sampler = own()
    monkeypatch.setattr(Trainer, "_get_train_sampler", lambda *args: sampler)
    run = Run(target)
    assert run.sampler is sampler
    run.order()
    assert not run.acts


def test_trl_asks_for_it_without_a_dataset_too(target: Any) -> None:
    run = Run(target)
    assert inspect.signature(run.trainer._get_train_sampler).parameters
    assert list(run.trainer._get_train_sampler()) == run.order()
