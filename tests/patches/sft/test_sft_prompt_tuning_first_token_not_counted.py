"""The count by which the loss of a step is divided has first tokens where a virtual token predicts them."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptEncoderConfig, PromptTuningConfig
from trl.trainer import sft_trainer

from trl_hotfix.testing import stub_trainer

import tiny

ID = "sft-prompt-tuning-first-token-not-counted"
TARGET = "trl.trainer.sft_trainer:SFTTrainer._get_num_items_in_batch"
SOFT = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
STEP = ([[5, 6, 7, 8], [9, 5, 6, -100]], [[5, 6], [-100, 7]])
"""The labels of two micro-batches of two rows. Ten are learned, and three of these are first."""


def trainer_of(adapter: Any = SOFT, **attributes: Any) -> Any:
    usual: dict[str, Any] = {"model_accepts_loss_kwargs": True, "compute_loss_func": None, "_loss_shifts_labels": True}
    usual |= dict.fromkeys(("get_tp_size", "get_cp_size", "get_sp_size"), lambda: 1)
    args = SimpleNamespace(average_tokens_across_devices=False, world_size=1, n_gpu=1)
    model = torch.nn.Linear(1, 1)
    if adapter is not None:
        model.active_peft_config = adapter
    return stub_trainer(sft_trainer.SFTTrainer, args, model=model, **{**usual, **attributes})


def batches_of(*labels: Any, **others: Any) -> list[Any]:
    return [{"labels": torch.tensor(rows), **others} for rows in labels]


def count_of(trainer: Any, batches: list[Any]) -> float | None:
    before = [{**batch} for batch in batches]
    count = trainer._get_num_items_in_batch(batches, "cpu")
    assert all(batch[name] is value for batch, old in zip(batches, before, strict=True) for name, value in old.items())
    return None if count is None else float(count)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("adapter", [SOFT, PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)])
def test_first_tokens_are_counted_in_each_step(adapter: Any, training: bool) -> None:
    trainer = trainer_of(adapter)
    trainer.model.train(training)
    for number in (1, 2):
        assert count_of(trainer, batches_of(*STEP)) == 10
        assert tiny.acts(ID, TARGET, trainer) == number
    assert count_of(trainer, batches_of(STEP[1])) == 3


def test_first_tokens_that_are_no_labels_are_not_counted() -> None:
    assert count_of(trainer_of(), batches_of([[-100, 6, 7, 8], [-100, 5, 6, -100]])) == 5


def test_the_counts_of_all_ranks_are_added() -> None:
    trainer = trainer_of()
    trainer.args.average_tokens_across_devices, trainer.args.world_size = True, 2
    trainer.accelerator.gather = lambda own: torch.stack([own, torch.tensor(4)])
    assert count_of(trainer, batches_of(*STEP)) == 14


def test_the_fetched_batches_are_counted_so() -> None:
    trainer = trainer_of()
    batches = batches_of(*STEP, STEP[0])
    iterator = iter(batches)
    fetched, count = trainer.get_batch_samples(iterator, 2, "cpu")
    assert float(count) == 10
    assert list(map(id, fetched)) == list(map(id, batches[:2]))
    assert next(iterator) is batches[2]


def test_transformers_leaves_first_tokens_out(switch: Any) -> None:
    with switch.off():
        assert count_of(trainer_of(), batches_of(*STEP)) == 7


def loss_of(module: str) -> Callable[..., Any]:
    def loss(*args: Any, **kwargs: Any) -> None: ...

    loss.__module__ = module
    return loss


def test_a_loss_of_trl_has_first_tokens_too() -> None:
    assert count_of(trainer_of(compute_loss_func=loss_of("trl.trainer.sft_trainer")), batches_of(*STEP)) == 10


UNTOUCHED: dict[str, tuple[Any, dict[str, Any], float]] = {
    "prefix tuning": (PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), {}, 7),
    "LoRA": (LoraConfig(task_type="CAUSAL_LM"), {}, 7),
    "no adapter": (None, {}, 7),
    "a loss of the user": (SOFT, {"compute_loss_func": loss_of("__main__")}, 7),
    "a loss of a name like TRL": (SOFT, {"compute_loss_func": loss_of("trlx")}, 7),
    "labels that are not shifted": (SOFT, {"_loss_shifts_labels": False}, 10),
}


@pytest.mark.parametrize(("adapter", "attributes", "count"), UNTOUCHED.values(), ids=list(UNTOUCHED))
def test_other_counts_stay(adapter: Any, attributes: dict[str, Any], count: float) -> None:
    trainer = trainer_of(adapter, **attributes)
    assert count_of(trainer, batches_of(*STEP)) == count
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_labels_that_are_shifted_already_are_counted_as_they_are() -> None:
    shifted = torch.tensor([[6, 7, 8, -100]])
    assert count_of(trainer_of(), [{"labels": torch.tensor([[5, 6, 7, 8]]), "shift_labels": shifted}]) == 3


@pytest.mark.parametrize("batches", [[], [{"input_ids": torch.ones(1, 2)}]], ids=["no batch", "no labels"])
def test_what_has_no_labels_has_no_count(batches: list[Any]) -> None:
    assert count_of(trainer_of(), batches) is None
