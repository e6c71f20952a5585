"""Each micro-batch has the share of its step that its tokens have, and generated ones equal shares."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.authoring import deepspeed_divides
from trl_hotfix.testing import distillation_stub, divergence

import tiny

try:
    from trl.experimental.gkd.gkd_trainer import GKDConfig, GKDTrainer
except ImportError:
    from trl.trainer.gkd_trainer import GKDConfig, GKDTrainer

ID = "gkd-grad-accum-scaling"
TARGET = f"{GKDTrainer.__module__}:GKDTrainer.compute_loss"
MIXES_LOG_PROBS = "logsumexp" not in inspect.unwrap(GKDTrainer.generalized_jsd_loss).__code__.co_names

Row = tuple[list[int], list[int]]
"""The token ids of a prompt and of its completion."""

ROWS: Sequence[Row] = (([1, 2], [3, 4, 5]), ([6], [7, 8, 9, 1, 2]), ([3, 7, 8], [9]), ([2], [4, 6]))
"""Two micro-batches of each step."""


def stub(ranks: int = 1, *, settings: Any = (), **attributes: Any) -> Any:
    defaults = {
        "model_accepts_loss_kwargs": True,
        "is_deepspeed_enabled": False,
        # The last step of an epoch has fewer.
        "current_gradient_accumulation_steps": 3,
    }
    trainer = distillation_stub(
        GKDTrainer, GKDConfig, {"gradient_accumulation_steps": 5, **dict(settings)}, **{**defaults, **attributes}
    )
    trainer.accelerator.num_processes = ranks
    return trainer


def batch_of(row: Row) -> dict[str, Any]:
    prompt, completion = row
    token_ids = torch.tensor([[*prompt, *completion]])
    labels = torch.tensor([[*[-100] * len(prompt), *completion]])
    prompts = token_ids[:, : len(prompt)]
    return {
        "input_ids": token_ids,
        "attention_mask": torch.ones_like(token_ids),
        "labels": labels,
        "prompts": prompts,
    }


def generated(trainer: Any, number: int = 0) -> dict[str, Any]:
    """Return a batch of two completions as GKD makes it. The labels name the prompts too."""
    prompts = torch.tensor([[1, 2], [3, 4]])
    rows = [[5, 6, 10, *[9] * number], [*[7] * number, 8, 0, 0]]
    sequences = torch.cat([prompts, torch.tensor(rows)], dim=1)
    writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=sequences))
    batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    ids, mask, labels = trainer.generate_on_policy_outputs(writer, batch, SimpleNamespace(eos_token_id=0), 0)
    # A copy, since Trainer may make one on the way.
    return {"input_ids": ids, "attention_mask": mask, "labels": labels.clone(), "prompts": prompts}


def share(trainer: Any, batch: dict[str, Any], items: int | None, **options: Any) -> float:
    """Return the loss over the mean divergence, which the gradient has too."""
    count = None if items is None else torch.tensor(items)
    result = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count, **options)
    loss = result[0] if options else result
    # TRL begins behind the prompts.
    behind = torch.arange(1, batch["labels"].shape[1]) >= batch["prompts"].shape[1]
    counted = (batch["labels"][:, 1:] != -100) & behind
    of_tokens = divergence(trainer, batch["input_ids"], mixes_log_probs=MIXES_LOG_PROBS)
    mean = (of_tokens * counted).sum() / counted.sum()
    found = float(loss / mean)
    gradients = [torch.autograd.grad(value, trainer.model.weight)[0] for value in (loss, mean * found)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-6)
    return found


def test_each_micro_batch_of_each_step_has_the_share_of_its_tokens() -> None:
    trainer = stub()
    for number, row in enumerate(ROWS):
        trainer.state.global_step = number // 2
        assert share(trainer, batch_of(row), 7) == pytest.approx(len(row[1]) / 7, rel=1e-4)
    assert tiny.acts(ID, TARGET, trainer) == len(ROWS)


def test_trl_takes_the_mean_of_each_micro_batch(switch: Any) -> None:
    trainer = stub()
    with switch.off():
        for row in ROWS:
            assert share(trainer, batch_of(row), 7) == pytest.approx(1, rel=1e-4)


def test_the_outputs_are_returned_too() -> None:
    trainer, batch = stub(), batch_of(ROWS[0])
    assert share(trainer, batch, 7, return_outputs=True) == pytest.approx(3 / 7, rel=1e-4)
    _, outputs = trainer.compute_loss(trainer.model, batch, True, torch.tensor(7))
    assert outputs.logits.equal(trainer.model.weight[batch["input_ids"]])


def test_generated_micro_batches_have_equal_shares_of_the_step() -> None:
    trainer = stub()
    for number in range(2):
        assert share(trainer, generated(trainer, number), 5) == pytest.approx(1 / 3, rel=1e-4)


def test_without_a_count_of_micro_batches_the_shares_are_those_of_gradient_accumulation_steps() -> None:
    trainer = stub(current_gradient_accumulation_steps=None)
    assert share(trainer, generated(trainer), 5) == pytest.approx(1 / 5, rel=1e-4)


def test_rows_of_the_dataset_after_a_generation_have_the_share_of_their_tokens() -> None:
    trainer = stub()
    generated(trainer)
    for row in ROWS:
        assert share(trainer, batch_of(row), 7) == pytest.approx(len(row[1]) / 7, rel=1e-4)


@pytest.mark.parametrize(
    ("settings", "copies"),
    [({}, 4), ({"average_tokens_across_devices": False}, 1), ({"n_gpu": 2}, 1)],
    ids=["counts over all ranks", "counts of its own", "several GPUs in one process"],
)
def test_the_loss_is_multiplied_by_the_ranks_that_are_counted(settings: dict[str, Any], copies: int) -> None:
    trainer = stub(4, settings=settings)
    for row in ROWS:
        assert share(trainer, batch_of(row), 14) == pytest.approx(len(row[1]) * copies / 14, rel=1e-4)


def test_each_trainer_has_its_own_steps() -> None:
    for _ in range(2):
        trainers = stub(), stub()
        for row, trainer in zip(ROWS, trainers, strict=False):
            assert share(trainer, batch_of(row), 7) == pytest.approx(len(row[1]) / 7, rel=1e-4)


@pytest.mark.parametrize(
    "trainer",
    [stub(model_accepts_loss_kwargs=False), stub(settings={"gradient_accumulation_steps": 1})],
    ids=["Trainer divides", "one micro-batch"],
)
def test_a_loss_that_somebody_divides_is_left_as_it_is(trainer: Any) -> None:
    assert share(trainer, batch_of(ROWS[0]), 7) == pytest.approx(1, rel=1e-4)
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_under_deepspeed_the_engine_divides_before_transformers_4_49() -> None:
    trainer = stub(is_deepspeed_enabled=True)
    right = 1 if deepspeed_divides() else 3 / 7
    assert share(trainer, batch_of(ROWS[0]), 7) == pytest.approx(right, rel=1e-4)


def test_a_loss_without_a_count_is_left_as_it_is() -> None:
    assert share(stub(), batch_of(ROWS[0]), None) == pytest.approx(1, rel=1e-4)


def test_an_evaluation_is_left_as_it_is() -> None:
    trainer = stub()
    trainer.model.eval()
    assert share(trainer, batch_of(ROWS[0]), 7) == pytest.approx(1, rel=1e-4)
