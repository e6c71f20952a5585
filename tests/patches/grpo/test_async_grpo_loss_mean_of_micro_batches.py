"""Each micro-batch of a step is divided by the mean of their counts, and by their number: by the tokens of the step."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer

from trl_hotfix.testing import stub_trainer

import tiny
from tiny import async_runs

ID = "async-grpo-loss-mean-of-micro-batches"
HERE = [kind for kind in async_runs.KINDS if async_runs.module_of(kind) is not None]


@pytest.fixture(params=async_runs.KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    if request.param not in HERE:
        pytest.skip("this release has no such trainer, or transformers is too old for it")
    return request.param


def trainer_of(kind: str) -> Any:
    trainer_class = getattr(async_runs.module_of(kind), f"{kind}Trainer")
    settings = SimpleNamespace(world_size=1, n_gpu=1, average_tokens_across_devices=False)
    attributes = {"model_accepts_loss_kwargs": False, "compute_loss_func": None, "is_tp_enabled": False}
    return stub_trainer(trainer_class, settings, **attributes)


def fetched(trainer: Any, batches: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    """Fetch the micro-batches of a step, of which there should be ``number``."""
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    step, count = trainer.get_batch_samples(iter(batches), number, *device)
    assert count is None
    return list(step)


def batch_of(tokens: float, rows: int = 1) -> dict[str, Any]:
    """Return what the collator makes for a rank: TRL repeats the count for each row, and has one row since 1.7."""
    return {"input_ids": torch.arange(4).repeat(rows, 1), "global_n_tokens": torch.full((rows,), tokens)}


def acts(kind: str, trainer: Any) -> int | None:
    module = async_runs.module_of(kind)
    return tiny.acts(ID, f"{module.__name__}:{kind}Trainer.get_batch_samples", trainer)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("counts", [(2.0, 18.0), (18.0, 2.0), (5.0, 0.0, 4.0)])
def test_each_micro_batch_has_the_mean_count_of_the_step(kind: str, counts: tuple[float, ...], rows: int) -> None:
    trainer = trainer_of(kind)
    step = fetched(trainer, [batch_of(tokens, rows) for tokens in counts], len(counts))
    assert len(step) == len(counts)
    for batch in step:
        torch.testing.assert_close(batch["global_n_tokens"], torch.full((rows,), sum(counts) / len(counts)))
        assert torch.equal(batch["input_ids"], batch_of(1.0, rows)["input_ids"])
    assert acts(kind, trainer) == 1


def test_each_step_has_a_mean_of_its_own(kind: str) -> None:
    trainer = trainer_of(kind)
    means = []
    for counts in ((1.0, 3.0), (10.0, 20.0)):
        step = fetched(trainer, [batch_of(tokens) for tokens in counts], 2)
        means.append([float(batch["global_n_tokens"]) for batch in step])
    assert means == [[2.0, 2.0], [15.0, 15.0]]
    assert acts(kind, trainer) == 2


def test_the_last_micro_batch_of_a_queue_may_have_fewer_rows(kind: str) -> None:
    first, last = fetched(trainer_of(kind), [batch_of(9.0, 3), batch_of(2.0, 1)], 4)
    assert first["global_n_tokens"].tolist() == [5.5, 5.5, 5.5]
    assert last["global_n_tokens"].tolist() == [5.5]


@pytest.mark.parametrize("number", [1, 2])
def test_a_step_of_one_micro_batch_keeps_its_count(kind: str, number: int) -> None:
    trainer, batch = trainer_of(kind), batch_of(7.0, 2)
    count = batch["global_n_tokens"]
    (found,) = fetched(trainer, [batch], number)
    assert found is batch
    assert found["global_n_tokens"] is count
    assert acts(kind, trainer) == 0


def test_a_queue_that_has_ended_gives_no_micro_batch(kind: str) -> None:
    trainer = trainer_of(kind)
    assert fetched(trainer, [], 2) == []
    assert acts(kind, trainer) == 0


def test_batches_of_a_collator_without_a_count_stay(kind: str) -> None:
    trainer = trainer_of(kind)
    first, second = fetched(trainer, [batch_of(2.0), {"input_ids": torch.zeros(1, 1)}], 2)
    assert float(first["global_n_tokens"]) == 2.0
    assert set(second) == {"input_ids"}
    assert acts(kind, trainer) == 0


def test_the_gradient_of_a_step_does_not_depend_on_how_it_is_cut(kind: str, switch: Any) -> None:
    def gradients(run: async_runs.AsyncRun) -> dict[str, Any]:
        return {name: value / run.factor for name, value in run.steps[0].gradients.items()}

    def difference(run: async_runs.AsyncRun) -> float:
        return max(float((value - whole[name]).abs().max()) for name, value in gradients(run).items())

    whole = gradients(async_runs.train(ID, kind, accumulated=1, rows=8, steps=1))
    for accumulated in (2, 4):
        cut = async_runs.train(ID, kind, accumulated=accumulated, rows=8 // accumulated, steps=1)
        assert difference(cut) < 1e-6
        assert cut.acted == 1
    with switch.off():
        cut = async_runs.train(ID, kind, accumulated=4, rows=2, steps=1)
    assert difference(cut) > 1e-3


def test_the_trained_tokens_of_a_step_are_logged_as_before(kind: str) -> None:
    run = async_runs.train(ID, kind, accumulated=2)
    logged = [line["batch/trained_tokens_per_step"] for line in run.metrics if "batch/trained_tokens_per_step" in line]
    if not logged:
        pytest.skip("before 1.11 there is no such metric")
    assert logged == [18.0, 21.0]
