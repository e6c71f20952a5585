"""One line is logged when a training begins in which nothing is trainable, and none otherwise."""

from __future__ import annotations

import importlib
import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trl.trainer import rloo_trainer

from trl_hotfix.testing import stub_trainer

MODULES = [rloo_trainer]
if importlib.util.find_spec("trl.trainer.base_trainer"):
    MODULES.append(importlib.import_module("trl.trainer.base_trainer"))
CLASSES = [
    next(getattr(module, name) for name in ("RLOOTrainer", "_BaseTrainer", "BaseTrainer") if name in vars(module))
    for module in MODULES
]
LOADER = object()


def frozen() -> Any:
    return torch.nn.Linear(1, 1).requires_grad_(False)


def stub(trainer_class: Any, model: Any, *, main: bool = True, **state: Any) -> Any:
    """Return a trainer in its training, whose dataloader is ``LOADER``."""
    arguments = dict.fromkeys(("dataloader_num_workers", "process_index"), 0)
    arguments |= dict.fromkeys(
        ("dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_drop_last"), False
    )
    trainer = stub_trainer(
        trainer_class,
        SimpleNamespace(**arguments, dataloader_prefetch_factor=None, steps_per_generation=1),
        model=model,
        train_dataset=[1],
        data_collator=list,
        _train_batch_size=1,
        _get_train_sampler=lambda *args: None,
        _get_collator_with_removed_columns=lambda collator, description: collator,
        _get_dataloader=lambda **settings: LOADER,
        **{"is_in_train": True, **state},
    )
    trainer.accelerator = SimpleNamespace(is_main_process=main, prepare=lambda loader: LOADER)
    return trainer


each_class = pytest.mark.parametrize("trainer_class", CLASSES, ids=lambda each: each.__name__)


@each_class
def test_a_frozen_model_is_reported_with_what_to_do(messages: list[str], trainer_class: Any) -> None:
    assert stub(trainer_class, frozen()).get_train_dataloader() is LOADER
    assert messages == [
        f"{trainer_class.__name__}: nothing is trained, since all 2 parameter tensors of the model are frozen. PEFT "
        "loads an adapter for inference by default: load it with PeftModel.from_pretrained(..., is_trainable=True)"
    ]


@each_class
def test_a_trainer_is_reported_once_and_another_one_again(messages: list[str], trainer_class: Any) -> None:
    first, second = stub(trainer_class, frozen()), stub(trainer_class, frozen())
    for trainer in (first, first, second):
        trainer.get_train_dataloader()
    assert len(messages) == 2


@each_class
def test_one_trainable_parameter_is_enough(messages: list[str], trainer_class: Any) -> None:
    first, last = frozen(), frozen()
    first.weight.requires_grad_()
    last.bias.requires_grad_()
    for model in (first, last, torch.nn.Linear(1, 1), torch.nn.Module()):
        stub(trainer_class, model).get_train_dataloader()
    assert messages == []


@each_class
def test_a_look_at_the_data_before_a_training_gets_no_line_and_uses_none_up(
    messages: list[str], trainer_class: Any
) -> None:
    trainer = stub(trainer_class, frozen(), is_in_train=False)
    trainer.get_train_dataloader()
    vars(trainer).pop("is_in_train")
    trainer.get_train_dataloader()
    assert messages == []
    trainer.is_in_train = True
    trainer.get_train_dataloader()
    assert len(messages) == 1


@each_class
def test_a_model_that_was_made_trainable_meanwhile_gets_no_line(messages: list[str], trainer_class: Any) -> None:
    trainer = stub(trainer_class, frozen(), is_in_train=False)
    trainer.get_train_dataloader()
    trainer.model.requires_grad_()
    trainer.is_in_train = True
    trainer.get_train_dataloader()
    assert messages == []


@each_class
def test_the_main_process_alone_says_it(messages: list[str], trainer_class: Any) -> None:
    assert stub(trainer_class, frozen(), main=False).get_train_dataloader() is LOADER
    assert messages == []


@each_class
def test_without_the_patch_there_is_no_line(messages: list[str], switch: Any, trainer_class: Any) -> None:
    with switch.off():
        assert stub(trainer_class, frozen()).get_train_dataloader() is LOADER
    assert messages == []


def test_the_dataloader_of_grpo_says_nothing(messages: list[str]) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    stub(GRPOTrainer, frozen()).get_train_dataloader()
    assert messages == []
