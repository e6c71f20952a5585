"""Gradient checkpointing is off when a prefix is trained, with a line; every other run keeps it and gets none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from transformers import TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.testing import default_arguments

import tiny
from tiny.beginning import about_to_train

ID = "prefix-tuning-dropped-by-gradient-checkpointing"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.name: target for target in gates.targets_here(PATCH)}
LOADER = object()


@pytest.fixture(params=list(TARGETS))
def target(request: pytest.FixtureRequest) -> Any:
    """The method of each class that makes the loader of a training."""
    return TARGETS[request.param]


class Model(SimpleNamespace):
    """A model that checkpoints, with an adapter of this type."""

    def __init__(self, peft_type: Any) -> None:
        super().__init__(active_peft_config=SimpleNamespace(peft_type=peft_type), checkpoints=True)

    def gradient_checkpointing_disable(self) -> None:
        self.checkpoints = False


def prefix() -> Any:
    from peft import PeftType

    return Model(PeftType.PREFIX_TUNING)


def trainer_of(target: Any, model: Any, *, on: bool = True, main: bool = True, **state: Any) -> Any:
    settings = {"gradient_checkpointing": on, "process_index": 0, "precompute_ref_log_probs": False}
    args = default_arguments(TrainingArguments, **settings)
    return about_to_train(target, args, LOADER, main=main, model=model, **state)


def begin(target: Any, trainer: Any) -> tuple[bool, int | None]:
    """Begin to train, and return whether the run checkpoints, and in how many calls the patch acted."""
    assert trainer.get_train_dataloader() is LOADER
    return trainer.args.gradient_checkpointing, tiny.acts(ID, target.name, trainer)


def test_checkpointing_is_off_for_a_prefix_with_what_to_do(target: Any, messages: list[str]) -> None:
    trainer = trainer_of(target, prefix())
    assert begin(target, trainer) == (False, 1)
    assert trainer.model.checkpoints is False
    assert messages == [
        f"{target.attribute.partition('.')[0]}: gradient checkpointing is off, since it drops the prefix of prefix "
        "tuning: nothing would be trained. A micro-batch takes more memory so: if it is too much, use a smaller one, "
        "or LoRA"
    ]


def test_each_trainer_gets_one_line(target: Any, messages: list[str]) -> None:
    first, second = trainer_of(target, prefix()), trainer_of(target, prefix())
    for trainer in (first, first, second):
        trainer.args.gradient_checkpointing = True
        assert begin(target, trainer)[0] is False
    assert len(messages) == 2


def test_each_rank_switches_it_off_and_the_main_process_says_it(target: Any, messages: list[str]) -> None:
    assert begin(target, trainer_of(target, prefix(), main=False)) == (False, 1)
    assert messages == []


@pytest.mark.parametrize("peft_type", ["LORA", "PROMPT_TUNING", "P_TUNING", None])
def test_other_adapters_keep_it(target: Any, messages: list[str], peft_type: str | None) -> None:
    from peft import PeftType

    model = Model(PeftType[peft_type] if peft_type else None)
    assert begin(target, trainer_of(target, model)) == (True, 0)
    assert model.checkpoints
    assert messages == []


@pytest.mark.parametrize("state", [{"on": False}, {"is_in_train": False}], ids=["off", "no training"])
def test_a_prefix_that_is_not_trained_with_it_is_left_alone(
    target: Any, messages: list[str], state: dict[str, Any]
) -> None:
    model = prefix()
    trainer = trainer_of(target, model, **state)
    assert begin(target, trainer) == (state.get("on", True), 0)
    assert model.checkpoints
    assert messages == []


def test_a_model_without_an_adapter_keeps_it(target: Any, messages: list[str]) -> None:
    assert begin(target, trainer_of(target, SimpleNamespace())) == (True, 0)
    assert messages == []


def test_without_the_patch_the_prefix_is_trained_with_it(target: Any, messages: list[str], switch: Any) -> None:
    with switch.off():
        assert begin(target, trainer_of(target, prefix()))[0] is True
    assert messages == []
