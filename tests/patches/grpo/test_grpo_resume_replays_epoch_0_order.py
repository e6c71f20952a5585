"""A resumed run goes through the data in the orders that the run without a stop has from that epoch on."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.testing import default_arguments, stub_trainer, trainer_and_config

import tiny

ID = "grpo-resume-replays-epoch-0-order"
ROWS = 8

Orders = list[list[int]]

each_method = pytest.mark.parametrize("method", ["GRPO", "RLOO", "Distillation"])


class Run:
    """A trainer on so many prompts, which is asked for the sampler of its training."""

    def __init__(self, method: str, rows: int = ROWS, **settings: Any) -> None:
        name = f"trl.trainer.{method.lower()}_trainer"
        try:
            module = importlib.import_module(name)
        except ImportError:
            pytest.skip("this release has no such trainer")
        trainer_class, config_class = trainer_and_config(module, method)
        if "_get_train_sampler" not in vars(trainer_class):
            pytest.skip("this trainer leaves its sampler to transformers")
        of_a_step = {"num_generations": 2, "generation_batch_size": 4, "steps_per_generation": 1, "seed": 42}
        of_a_step |= {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 4}
        self.trainer = stub_trainer(
            trainer_class,
            default_arguments(config_class, **{**of_a_step, **settings}),
            train_dataset=range(rows),
            state=SimpleNamespace(epoch=None),
        )
        self.target = f"{name}:{method}Trainer._get_train_sampler"

    def orders(self, epoch: float | None = None, count: int = 2) -> Orders:
        """Return the orders of so many epochs of a run that begins at ``epoch``."""
        sampler = self.trainer._get_train_sampler()
        # transformers reads this from the checkpoint, after it has made the sampler and before the first batch.
        self.trainer.state.epoch = epoch
        found = []
        for number in range(1, count + 1):
            found.append(list(sampler))
            # It counts on during the training.
            self.trainer.state.epoch = int(epoch or 0) + number
        return found

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


def without_a_stop(method: str, count: int = 5, **settings: Any) -> Orders:
    """Return the orders of a run that begins at the beginning. No two of them are equal."""
    run = Run(method, **settings)
    found = run.orders(count=count)
    assert not run.acts
    assert len({tuple(order) for order in found}) == count
    assert len({tuple(sorted(order)) for order in found}) == 1
    return found


# At the end of an epoch its last batch was trained on, and the next epoch begins.
resumed_at = pytest.mark.parametrize("epoch", [1.0, 1.25, 2.0, 2.75, 3.0])


@each_method
@resumed_at
def test_a_resumed_run_has_the_orders_of_its_epochs(method: str, epoch: float) -> None:
    run = Run(method)
    assert run.orders(epoch) == without_a_stop(method)[int(epoch) : int(epoch) + 2]
    assert run.acts == 1


@each_method
def test_trl_has_the_orders_of_the_first_epochs_again(method: str, switch: Any) -> None:
    with switch.off():
        for epoch in (1.0, 2.75):
            assert Run(method).orders(epoch) == without_a_stop(method)[:2]


@each_method
@pytest.mark.parametrize(
    "settings",
    [{"seed": 7}, {"num_iterations": 2}, {"num_generations": 4}, {"per_device_train_batch_size": 2, "rows": 6}],
    ids=str,
)
def test_repeated_prompts_and_another_seed_have_the_orders_of_their_epochs(
    method: str, settings: dict[str, Any]
) -> None:
    assert Run(method, **settings).orders(2.5) == without_a_stop(method, 4, **settings)[2:]


@each_method
@pytest.mark.parametrize("epoch", [None, 0.0, 0.75])
def test_a_run_in_its_first_epoch_begins_with_the_first_order(method: str, epoch: float | None) -> None:
    run = Run(method)
    assert run.orders(epoch) == without_a_stop(method)[:2]
    assert run.acts == 0


@each_method
def test_earlier_orders_are_drawn_before_the_first_pass_alone(method: str) -> None:
    assert Run(method).orders(1.5, 4) == without_a_stop(method)[1:]


@each_method
def test_a_pass_that_is_left_early_counts_as_one(method: str) -> None:
    run = Run(method)
    sampler = run.trainer._get_train_sampler()
    run.trainer.state.epoch = 1.5
    orders = without_a_stop(method)
    assert next(iter(sampler)) == orders[1][0]
    assert list(sampler) == orders[2]


@each_method
def test_each_training_of_a_trainer_has_the_orders_of_its_epochs(method: str) -> None:
    run, orders = Run(method), without_a_stop(method)
    for epoch in (2.0, 0.0, 1.25):
        assert run.orders(epoch) == orders[int(epoch) : int(epoch) + 2]
    assert run.acts == 2


@each_method
def test_each_trainer_has_the_orders_of_its_epochs(method: str) -> None:
    first, second, orders = Run(method), Run(method), without_a_stop(method)
    samplers = [run.trainer._get_train_sampler() for run in (first, second)]
    first.trainer.state.epoch, second.trainer.state.epoch = 1.0, 2.0
    for number in range(2):
        assert [list(sampler) for sampler in samplers] == [orders[1 + number], orders[2 + number]]


@each_method
def test_a_run_without_prompts_draws_none(method: str) -> None:
    assert Run(method, rows=0).orders(1.5) == [[], []]


@each_method
def test_data_that_are_not_shuffled_have_the_sampler_of_trl(method: str) -> None:
    run = Run(method, shuffle_dataset=False)
    sampler = run.trainer._get_train_sampler()
    if getattr(sampler, "generator", None) is not None:
        pytest.skip("in this release all data are shuffled")
    # A view has the class of what it is a view of.
    assert type(sampler) is sampler.__class__
    assert run.orders(1.5)[0] == run.orders(0.0)[0] == sorted(run.orders(0.0)[0])
    assert not run.acts


@each_method
def test_the_sampler_is_still_one_of_trl(method: str, switch: Any) -> None:
    run = Run(method)
    sampler = run.trainer._get_train_sampler()
    with switch.off():
        original = run.trainer._get_train_sampler()
    assert isinstance(sampler, type(original))
    assert len(sampler) == len(original)
