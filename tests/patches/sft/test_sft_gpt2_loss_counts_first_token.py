"""The count by which the loss of a step is divided has no first tokens, also where the class has no name of a loss."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig
from transformers.loss.loss_utils import ForCausalLMLoss
from trl.trainer import sft_trainer

from trl_hotfix.testing import stub_trainer

import tiny

ID = "sft-gpt2-loss-counts-first-token"
TARGET = "trl.trainer.sft_trainer:SFTTrainer._get_num_items_in_batch"
STEP = ([[5, 6, 7, 8], [9, 5, 6, -100]], [[5, 6], [-100, 7]])
"""The labels of two micro-batches of two rows. Ten are learned, and seven of these follow a token."""

ONE_TOKEN_A_ROW = ([[5], [6]], [[7], [8]])


def trainer_of(*, loss: Any = ForCausalLMLoss, of_encoder: bool = False, adapter: Any = None, **state: Any) -> Any:
    usual: dict[str, Any] = {"model_accepts_loss_kwargs": True, "compute_loss_func": None, "_loss_shifts_labels": False}
    usual |= dict.fromkeys(("get_tp_size", "get_cp_size", "get_sp_size"), lambda: 1)
    args = SimpleNamespace(average_tokens_across_devices=False, world_size=1, n_gpu=1)
    model = torch.nn.Linear(1, 1)
    model.loss_function, model.config = loss, SimpleNamespace(is_encoder_decoder=of_encoder)
    if adapter is not None:
        model.active_peft_config = adapter
    return stub_trainer(sft_trainer.SFTTrainer, args, model=model, **{**usual, **state})


def batches_of(*labels: Any, **others: Any) -> list[Any]:
    return [{"labels": torch.tensor(rows), **others} for rows in labels]


def count_of(trainer: Any, batches: list[Any]) -> float | None:
    """Return the count, which leaves the batches and the trainer's answer as they were."""
    before, answer = [{**batch} for batch in batches], trainer._loss_shifts_labels
    count = trainer._get_num_items_in_batch(batches, "cpu")
    assert all(batch[name] is value for batch, old in zip(batches, before, strict=True) for name, value in old.items())
    assert trainer._loss_shifts_labels is answer
    return None if count is None else float(count)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_first_tokens_are_not_counted_in_any_step(training: bool) -> None:
    trainer = trainer_of()
    trainer.model.train(training)
    for number in (1, 2):
        assert count_of(trainer, batches_of(*STEP)) == 7
        assert tiny.acts(ID, TARGET, trainer) == number
    assert count_of(trainer, batches_of(STEP[1])) == 2


def test_the_fetched_batches_are_counted_so() -> None:
    batches = batches_of(*STEP, STEP[0])
    iterator = iter(batches)
    fetched, count = trainer_of().get_batch_samples(iterator, 2, "cpu")
    assert float(count) == 7
    assert list(map(id, fetched)) == list(map(id, batches[:2]))
    assert next(iterator) is batches[2]


def test_a_step_that_predicts_nothing_counts_one() -> None:
    assert count_of(trainer_of(), batches_of(*ONE_TOKEN_A_ROW)) == 1


@pytest.mark.parametrize(("step", "count"), [(STEP, 11), (ONE_TOKEN_A_ROW, 4)], ids=["both", "the other one alone"])
def test_the_counts_of_all_ranks_are_added(step: Any, count: int) -> None:
    trainer = trainer_of()
    trainer.args.average_tokens_across_devices, trainer.args.world_size = True, 2
    trainer.accelerator.gather = lambda own: torch.stack([own, torch.tensor(4)])
    assert count_of(trainer, batches_of(*step)) == count


def test_transformers_counts_first_tokens(switch: Any) -> None:
    with switch.off():
        assert count_of(trainer_of(), batches_of(*STEP)) == 10


def loss_of(module: str) -> Callable[..., Any]:
    def loss(*args: Any, **kwargs: Any) -> None: ...

    loss.__module__ = module
    return loss


def test_a_loss_of_trl_predicts_no_first_token() -> None:
    assert count_of(trainer_of(compute_loss_func=loss_of("trl.trainer.sft_trainer")), batches_of(*STEP)) == 7


@pytest.mark.parametrize("kind", [LoraConfig, PrefixTuningConfig])
def test_an_adapter_without_virtual_tokens_before_the_rows_changes_nothing(kind: Any) -> None:
    sizes = {} if kind is LoraConfig else {"num_virtual_tokens": 2}
    assert count_of(trainer_of(adapter=kind(task_type="CAUSAL_LM", **sizes)), batches_of(*STEP)) == 7


UNTOUCHED: dict[str, tuple[dict[str, Any], float]] = {
    "counted without first tokens": ({"_loss_shifts_labels": True}, 7),
    "virtual tokens": ({"adapter": PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)}, 10),
    "a decoder with an encoder": ({"of_encoder": True}, 10),
    "a loss of the model": ({"loss": loss_of("transformers.loss.loss_utils")}, 10),
    "no loss function": ({"loss": None}, 10),
    "a loss of the user": ({"compute_loss_func": loss_of("__main__")}, 10),
    "a loss of a name like TRL": ({"compute_loss_func": loss_of("trlx")}, 10),
}


@pytest.mark.parametrize(("state", "count"), UNTOUCHED.values(), ids=list(UNTOUCHED))
def test_the_count_stays_where_it_is_right_or_not_known(state: dict[str, Any], count: float) -> None:
    trainer = trainer_of(**state)
    assert count_of(trainer, batches_of(*STEP)) == count
    assert tiny.acts(ID, TARGET, trainer) == 0


def test_a_model_without_a_loss_function_keeps_its_count() -> None:
    trainer = trainer_of()
    del trainer.model.loss_function, trainer.model.config
    assert count_of(trainer, batches_of(*STEP)) == 10


def test_a_loss_that_names_no_module_is_the_user_s() -> None:
    """Such as an object with ``__call__``."""
    loss = SimpleNamespace()
    assert not hasattr(loss, "__module__") or not loss.__module__.startswith("trl.")
    assert count_of(trainer_of(compute_loss_func=loss), batches_of(*STEP)) == 10


def test_labels_that_are_shifted_already_are_counted_as_they_are() -> None:
    shifted = torch.tensor([[6, 7, 8, -100]])
    assert count_of(trainer_of(), [{"labels": torch.tensor([[5, 6, 7, 8]]), "shift_labels": shifted}]) == 3


@pytest.mark.parametrize("batches", [[], [{"input_ids": torch.ones(1, 2)}]], ids=["no batch", "no labels"])
def test_what_has_no_labels_has_no_count(batches: list[Any]) -> None:
    assert count_of(trainer_of(), batches) is None
