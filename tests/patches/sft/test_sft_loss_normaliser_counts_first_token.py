"""The count by which the loss of a step is divided has no first tokens, where nothing predicts these."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wrapt
from transformers import Trainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import (
    as_tokenizer_of,
    constructed,
    default_arguments,
    quick_rows,
    single_process,
    tiny_attention_model,
    tiny_tokenizer,
)

import tiny

ID = "sft-loss-normaliser-counts-first-token"
NAME = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"
"""The method of transformers that counts."""

STEP = ([[5, 6, 7, 8], [9, 5, 6, -100]], [[5, 6], [-100, 7]])
"""The labels of two micro-batches of two rows. Ten are learned, and seven of these follow a token."""

ONE_TOKEN_A_ROW = ([[5], [6]], [[7], [8]])
NEXT_STEP = [[5, 6, 7]]


def trainer_of(**settings: Any) -> Any:
    trainer_class = sft_trainer.SFTTrainer
    args = default_arguments(
        sft_trainer.SFTConfig,
        **{
            "dataset_kwargs": {"skip_prepare_dataset": True},
            "dataset_text_field": "text",
            "loss_type": "nll",
            "accelerator_config": SimpleNamespace(dispatch_batches=None),
            "n_gpu": 1,
            "world_size": 1,
            "average_tokens_across_devices": False,
            **settings,
        },
    )
    given = {"args": args, **as_tokenizer_of(trainer_class, tiny_tokenizer())}
    rows = quick_rows([{"input_ids": [5]}])
    with single_process(sft_trainer):
        trainer = constructed(trainer_class, model=tiny_attention_model(), train_dataset=rows, **given)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func, trainer._loss_shifts_labels = True, None, True
    trainer.get_tp_size = trainer.get_cp_size = trainer.get_sp_size = one
    return trainer


def one() -> int:
    return 1


def batches_of(*labels: Any, **others: Any) -> list[Any]:
    return [{"labels": torch.tensor(rows), **others} for rows in labels]


def count_of(trainer: Any, step: list[Any]) -> float | None:
    """Return the count of a step, whose batches must come back as they are, and leave those of the next step."""
    # A trainer that counts itself takes whatever it is given.
    with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
    following = batches_of(NEXT_STEP)
    iterator = iter([*step, *following])
    fetched, count = trainer.get_batch_samples(iterator, len(step), *(["cpu"] if with_device else []))
    assert list(map(id, fetched)) == list(map(id, step))
    assert list(map(id, iterator)) == list(map(id, following))
    return None if count is None else float(count)


@pytest.mark.parametrize("training", [True, False])
def test_first_tokens_are_not_counted_in_any_step(training: bool) -> None:
    trainer = trainer_of()
    trainer.model.train(training)
    for _ in range(2):
        assert count_of(trainer, batches_of(*STEP)) == 7
    assert count_of(trainer, batches_of(STEP[1])) == 2
    assert count_of(trainer, batches_of(STEP[0], *STEP)) == 12


def test_the_labels_of_the_batches_stay() -> None:
    step = batches_of(*STEP)
    before = [batch["labels"].clone() for batch in step]
    count_of(trainer_of(), step)
    assert all(batch["labels"].equal(labels) for batch, labels in zip(step, before, strict=True))


def test_an_evaluation_counts_so_too() -> None:
    if not hasattr(Trainer, "_get_num_items_in_batch"):
        pytest.skip("this transformers counts in training alone")
    assert float(trainer_of()._get_num_items_in_batch(batches_of(STEP[0]), "cpu")) == 5


def test_each_of_two_trainers_counts_by_its_own_model() -> None:
    trainer, other = trainer_of(), trainer_of()
    other.model.config.is_encoder_decoder = True
    for _ in range(2):
        assert count_of(trainer, batches_of(*STEP)) == 7
        assert count_of(other, batches_of(*STEP)) == 10


def test_a_step_that_predicts_nothing_counts_one() -> None:
    trainer = trainer_of()
    assert count_of(trainer, batches_of(*ONE_TOKEN_A_ROW)) == 1
    assert count_of(trainer, batches_of([[5, 6], [7, -100]])) == 1


@pytest.mark.parametrize(("step", "count"), [(STEP, 11), (ONE_TOKEN_A_ROW, 4)], ids=["both", "the other one alone"])
def test_the_counts_of_all_ranks_are_added(step: Any, count: int) -> None:
    trainer = trainer_of(average_tokens_across_devices=True, world_size=2)
    trainer.accelerator.gather = lambda own: torch.stack([own, torch.tensor(4)])
    assert count_of(trainer, batches_of(*step)) == count


@pytest.mark.parametrize("step", [[{"input_ids": torch.tensor(STEP[0])}], [(torch.tensor(STEP[0]),)]])
def test_batches_without_labels_have_no_count(step: list[Any]) -> None:
    assert count_of(trainer_of(), step) is None


def test_an_empty_step_has_no_count() -> None:
    assert count_of(trainer_of(), []) is None


def test_labels_that_are_shifted_already_are_all_counted() -> None:
    assert count_of(trainer_of(), batches_of(*STEP, shift_labels=None)) == 10


def test_labels_that_are_no_sequence_are_all_counted() -> None:
    assert count_of(trainer_of(), batches_of(STEP[0][0], STEP[1][1])) == 5


def loss_of(module: str) -> Callable[..., Any]:
    def loss(*args: Any, **kwargs: Any) -> None: ...

    loss.__module__ = module
    return loss


def test_a_loss_of_trl_predicts_no_first_token() -> None:
    trainer = trainer_of()
    trainer.compute_loss_func = loss_of("trl.trainer.sft_trainer")
    assert count_of(trainer, batches_of(*STEP)) == 7


def of_encoder_and_decoder(trainer: Any, monkeypatch: Any) -> None:
    trainer.model.config.is_encoder_decoder = True


def with_virtual_tokens(trainer: Any, monkeypatch: Any) -> None:
    from peft import PromptTuningConfig

    trainer.model.active_peft_config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)


def with_its_own_loss(trainer: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(trainer.model), "loss_function", loss_of("__main__"))


def with_a_loss_of_the_user(trainer: Any, monkeypatch: Any) -> None:
    trainer.compute_loss_func = loss_of("__main__")


def with_a_loss_of_a_name_like_trl(trainer: Any, monkeypatch: Any) -> None:
    trainer.compute_loss_func = loss_of("trlx")


def that_counts_itself(trainer: Any, monkeypatch: Any) -> None:
    def count(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(Trainer, NAME)(self, *args, **kwargs)

    monkeypatch.setattr(type(trainer), NAME, count, raising=False)


@pytest.mark.parametrize(
    "change",
    [
        of_encoder_and_decoder,
        with_virtual_tokens,
        with_its_own_loss,
        with_a_loss_of_the_user,
        with_a_loss_of_a_name_like_trl,
        that_counts_itself,
    ],
)
def test_the_count_stays_where_it_is_right_or_not_known(
    change: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of()
    # It is asked at each count.
    assert count_of(trainer, batches_of(*STEP)) == 7
    with monkeypatch.context() as there:
        change(trainer, there)
        assert count_of(trainer, batches_of(*STEP)) == 10


def test_a_patch_on_the_class_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    @wrapt.decorator  # type: ignore[untyped-decorator]
    def another_patch(wrapped: Any, trainer: Any, args: Any, kwargs: Any) -> Any:
        return wrapped(*args, **kwargs)

    trainer = trainer_of()
    monkeypatch.setattr(type(trainer), NAME, another_patch(getattr(Trainer, NAME)), raising=False)
    assert count_of(trainer, batches_of(*STEP)) == 7


def test_an_adapter_without_virtual_tokens_changes_nothing() -> None:
    from peft import LoraConfig

    trainer = trainer_of()
    trainer.model.active_peft_config = LoraConfig(task_type="CAUSAL_LM")
    assert count_of(trainer, batches_of(*STEP)) == 7


def test_prefix_tuning_predicts_no_first_token() -> None:
    """Its virtual tokens are keys and values, which have no logits."""
    from peft import PrefixTuningConfig

    trainer = trainer_of()
    trainer.model.active_peft_config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    assert count_of(trainer, batches_of(*STEP)) == 7


@pytest.mark.parametrize(("is_encoder_decoder", "acted"), [(False, 1), (True, 0)])
def test_the_patch_acts_where_it_counts(is_encoder_decoder: bool, acted: int) -> None:
    with tiny.counted(ID) as counts:
        trainer = trainer_of()
        trainer.model.config.is_encoder_decoder = is_encoder_decoder
        assert counts().acted == 0
        for _ in range(2):
            count_of(trainer, batches_of(*STEP))
        assert counts().acted == acted


def test_the_count_of_a_trainer_can_be_pickled() -> None:
    function = vars(trainer_of())[NAME].func
    assert pickle.loads(pickle.dumps(function)) is function


def test_trl_counts_first_tokens(switch: Any) -> None:
    with switch.off():
        assert count_of(trainer_of(), batches_of(*STEP)) == 10
