"""The tokens of a step are counted for TRL's own loss, whatever the model accepts, and for no other loss."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Trainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import (
    constructed,
    default_arguments,
    quick_is_peft_model,
    quick_rows,
    single_process,
    tiny_attention_model,
    tiny_tokenizer,
)

import tiny

ID, TARGET = "sft-vlm-mean-of-micro-batches", "trl.trainer.sft_trainer:SFTTrainer.__init__"


def counting(**attributes: Any) -> Any:
    """Return a class of trainers whose model accepts no loss arguments, in a run of one process."""

    def one(self: Any) -> int:
        return 1

    own = {"model_accepts_loss_kwargs": False, "label_smoother": None, "compute_loss_func": None}
    sizes = dict.fromkeys(("get_tp_size", "get_cp_size", "get_sp_size"), one)
    return type("OfSuchAModel", (sft_trainer.SFTTrainer,), {**own, **sizes, "_loss_shifts_labels": True, **attributes})


def made(trainer_class: Any, compute_loss_func: Any = None, **settings: Any) -> Any:
    defaults: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text"}
    defaults |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False, "loss_type": "nll"}
    args = default_arguments(
        sft_trainer.SFTConfig, accelerator_config=SimpleNamespace(dispatch_batches=None), **{**defaults, **settings}
    )
    model, rows = tiny_attention_model(), quick_rows([{"input_ids": [5]}])
    with single_process(sft_trainer), quick_is_peft_model(sft_trainer):
        return constructed(
            trainer_class,
            model=model,
            args=args,
            train_dataset=rows,
            processing_class=tiny_tokenizer(),
            compute_loss_func=compute_loss_func,
        )


def count(trainer: Any) -> int | None:
    """Return the count of a step of two micro-batches, of five tokens and of one to predict."""
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    step = [{"labels": torch.tensor([[-100, 6, 7, 8], [-100, 5, 6, -100]])}, {"labels": torch.tensor([[-100, 9]])}]
    counted = trainer.get_batch_samples(iter(step), 2, *device)[1]
    return None if counted is None else int(counted)


def acts(trainer: Any) -> int:
    return tiny.acts(ID, TARGET, trainer) or 0


@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_tokens_of_the_step_are_counted(loss_type: str) -> None:
    trainer = made(counting(), loss_type=loss_type)
    assert count(trainer) == 6
    assert trainer.model_accepts_loss_kwargs is True
    assert acts(trainer) == 1


def test_those_of_each_trainer_are() -> None:
    assert [count(made(counting())) for _ in range(2)] == [6, 6]


def test_trl_counts_none(switch: Any) -> None:
    with switch.off():
        assert count(made(counting())) is None


def test_a_model_that_accepts_them_is_left_as_it_is() -> None:
    trainer = made(counting(model_accepts_loss_kwargs=True))
    assert count(trainer) == 6
    assert acts(trainer) == 0


def own_compute_loss(self: Any, *args: Any, **kwargs: Any) -> Any:
    return sft_trainer.SFTTrainer.compute_loss(self, *args, **kwargs)


@pytest.mark.parametrize(
    "attributes",
    [{"label_smoother": len}, {"compute_loss": own_compute_loss}],
    ids=["label smoothing", "a subclass"],
)
def test_another_loss_is_left_as_it_is(attributes: dict[str, Any]) -> None:
    trainer = made(counting(**attributes))
    assert trainer.model_accepts_loss_kwargs is False
    assert acts(trainer) == 0


def test_a_loss_of_the_user_is_left_as_it_is() -> None:
    trainer = made(counting(), compute_loss_func=len)
    assert trainer.model_accepts_loss_kwargs is False
    assert acts(trainer) == 0


@pytest.mark.parametrize("enabled", [True, False])
def test_sequence_parallelism_is_left_as_it_is(enabled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    parallel = SimpleNamespace(sp_enabled=enabled, cp_enabled=False, sp_backend="deepspeed", tp_size=1)
    trainer_class = counting()

    def given(self: Any) -> Any:
        return vars(self)["accelerator"]

    def keep(self: Any, accelerator: Any) -> None:
        accelerator.parallelism_config = parallel
        vars(self)["accelerator"] = accelerator

    monkeypatch.setattr(trainer_class, "accelerator", property(given, keep), raising=False)
    trainer = made(trainer_class)
    assert trainer.model_accepts_loss_kwargs is not enabled
    assert acts(trainer) == (not enabled)
