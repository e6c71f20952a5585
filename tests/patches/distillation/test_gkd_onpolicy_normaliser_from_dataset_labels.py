"""A generated micro-batch is divided by its own tokens, and a batch of the dataset by the tokens of each rank."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.experimental.gkd import gkd_trainer

from trl_hotfix.testing import distillation_stub

import tiny
from tiny import distillation

ID, TARGET = (
    "gkd-onpolicy-normaliser-from-dataset-labels",
    "trl.experimental.gkd.gkd_trainer:GKDTrainer.compute_loss",
)
COUNTED = 34
"""The tokens of the dataset that ``Trainer`` has counted."""

PADDING = 9


def stub(ranks: int = 1, **settings: Any) -> Any:
    trainer = distillation_stub(
        gkd_trainer.GKDTrainer, gkd_trainer.GKDConfig, {"gradient_accumulation_steps": 5, **settings}
    )
    trainer.accelerator.num_processes = ranks
    return trainer


def generated(trainer: Any, number: int = 0) -> dict[str, Any]:
    """Return a batch of two unequal completions, of ``4 + number`` tokens together with their ends, as GKD makes it."""
    prompts = torch.tensor([[1, 2], [3, 4]])
    rows = [[5, 6, 0, *[PADDING] * number], [*[7] * number, 0, PADDING, PADDING]]
    answered = torch.cat([prompts, torch.tensor(rows)], dim=1)
    writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=answered))
    batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    generate = trainer.generate_on_policy_outputs
    padding = (PADDING,) if "pad_token_id" in signature(generate).parameters else ()
    ids, mask, labels = generate(writer, batch, SimpleNamespace(eos_token_id=0), *padding)
    assert distillation.predicted_labels({"labels": labels}) == 4 + number
    # Copies, since Trainer may make some on the way.
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.clone(), "prompts": prompts}


def of_dataset(trainer: Any, number: int = 0) -> dict[str, Any]:
    """Return a batch that has the shape of a generated one, and labels of the dataset."""
    batch = generated(trainer, number)
    return {**batch, "labels": torch.where(batch["labels"] == -100, -100, batch["labels"] + 1)}


def divisor(trainer: Any, batch: dict[str, Any], counted: int | None = COUNTED) -> float:
    return distillation.divisor(trainer, batch, counted)


@pytest.mark.parametrize("accumulated", [1, 2, 3])
def test_each_generated_micro_batch_is_divided_by_its_tokens_and_the_micro_batches(accumulated: int) -> None:
    trainer = stub()
    for step in range(2):
        trainer.state.global_step, trainer.current_gradient_accumulation_steps = step, accumulated
        for number in range(accumulated):
            assert divisor(trainer, generated(trainer, number)) == pytest.approx((4 + number) * accumulated)
    assert tiny.acts(ID, TARGET, trainer) == 2 * accumulated


def test_without_a_count_of_micro_batches_it_is_gradient_accumulation_steps() -> None:
    trainer = stub()
    trainer.current_gradient_accumulation_steps = None
    assert divisor(trainer, generated(trainer)) == pytest.approx(4 * 5)


def test_trl_divides_by_the_tokens_of_the_dataset(switch: Any) -> None:
    trainer = stub(ranks=4)
    with switch.off():
        for number in range(2):
            assert divisor(trainer, generated(trainer, number)) == pytest.approx(COUNTED)
            assert divisor(trainer, of_dataset(trainer, number)) == pytest.approx(COUNTED)


@pytest.mark.parametrize("ranks", [1, 4])
def test_several_ranks_divide_generated_micro_batches_alike(ranks: int) -> None:
    trainer = stub(ranks=ranks)
    trainer.current_gradient_accumulation_steps = 2
    assert divisor(trainer, generated(trainer, 1)) == pytest.approx(5 * 2)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize(
    ("ranks", "settings", "right"),
    [
        (1, {}, COUNTED),
        (4, {}, COUNTED / 4),
        (4, {"average_tokens_across_devices": False}, COUNTED),
        (4, {"n_gpu": 2}, COUNTED),
        (1, {"n_gpu": 2}, COUNTED),
    ],
    ids=["one rank", "four ranks", "counts of its own", "several GPUs in each process", "several GPUs in one process"],
)
def test_batches_of_the_dataset_are_divided_by_the_mean_of_the_ranks(
    ranks: int, settings: dict[str, Any], right: float, training: bool
) -> None:
    trainer = stub(ranks, **settings)
    trainer.model.train(training)
    for number in range(2):
        assert divisor(trainer, of_dataset(trainer, number)) == pytest.approx(right)
    assert tiny.acts(ID, TARGET, trainer) == (0 if right == COUNTED else 2)


@pytest.mark.parametrize("make", [generated, of_dataset])
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_loss_without_a_count_is_a_mean_over_its_tokens(make: Any, ranks: int) -> None:
    trainer = stub(ranks)
    assert divisor(trainer, make(trainer, 1), counted=None) == pytest.approx(5)
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_only_the_batch_that_was_generated_last_is_a_generated_one() -> None:
    trainer = stub()
    trainer.current_gradient_accumulation_steps = 1
    first, second = generated(trainer, 0), generated(trainer, 1)
    assert divisor(trainer, first) == pytest.approx(COUNTED)
    assert divisor(trainer, second) == pytest.approx(5)


def test_each_trainer_divides_its_own_batches() -> None:
    for _ in range(2):
        trainers = stub(), stub()
        for number, trainer in enumerate(trainers):
            trainer.current_gradient_accumulation_steps = 2
            assert divisor(trainer, generated(trainer, number)) == pytest.approx((4 + number) * 2)


def answered_by(trainer: Any, labels: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return a generated batch with these labels."""
    from trl_hotfix.patches.distillation import gkd_onpolicy_normaliser_from_dataset_labels as patch

    batch = generated(trainer)
    monkeypatch.setattr(patch._generated, "_labels", labels(batch["labels"]))
    return {**batch, "labels": labels(batch["labels"])}


def test_a_generated_batch_without_a_token_has_the_loss_0(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = stub()
    batch = answered_by(trainer, lambda labels: torch.full_like(labels, -100), monkeypatch)
    assert trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(COUNTED)) == 0


def test_a_generated_batch_of_one_token_is_divided_by_the_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = stub()
    trainer.current_gradient_accumulation_steps = 3

    def one(labels: Any) -> Any:
        return labels.where(torch.arange(labels.numel()).view_as(labels) == 2, -100)

    assert divisor(trainer, answered_by(trainer, one, monkeypatch)) == pytest.approx(3)


def test_the_outputs_of_the_model_are_returned_too() -> None:
    trainer = stub()
    batch, count = generated(trainer), torch.tensor(COUNTED)
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    with_outputs, outputs = trainer.compute_loss(trainer.model, dict(batch), True, count)
    assert with_outputs.equal(loss)
    assert outputs.logits.equal(trainer.model.weight[batch["input_ids"]])
