"""A resumed run has the adapters "default" and "ref" of its checkpoint, and loads others as transformers does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_hotfix.authoring import shadowed
from trl_hotfix.testing import base_for_adapters, begin_trainer, single_process

from tiny.trainers import classes_with_a_reference_adapter, methods_with_a_reference_adapter

LORA = LoraConfig(r=1, target_modules=["q_proj"])


@pytest.fixture(params=methods_with_a_reference_adapter())
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return classes_with_a_reference_adapter(request.param)[0]


def peft_model(first: int = 0) -> Any:
    """Return a model with the adapters "default" and "other", whose weights are numbers from ``first`` on."""
    model = get_peft_model(base_for_adapters(), LORA)
    model.add_adapter("other", LORA)
    number(model, first)
    return model


def number(model: Any, first: int) -> None:
    """Set the weights of all adapters to numbers that are the same in bfloat16."""
    for place, weight in enumerate(weight for name, weight in model.named_parameters() if "lora_" in name):
        weight.data.copy_(first + 8 * place + torch.arange(weight.numel()).reshape(weight.shape))


def trainer_of(trainer_class: Any, *, active: str = "default", load: Any = None, **settings: Any) -> Any:
    """Return a trainer of a model with the adapters "default" and "other", and usually "ref".

    A part of the trained adapter is of bfloat16.
    """

    def prepare(trainer: Any) -> None:
        if load is not None:
            trainer._load_from_checkpoint = load
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
        ignored = dict.fromkeys(("add_callback", "remove_callback"), lambda callback: None)
        trainer.callback_handler = SimpleNamespace(**ignored, callbacks=[])

    model = peft_model()
    model.set_adapter(active)
    for name, weight in model.named_parameters():
        if "lora_A.default" in name:
            weight.data = weight.data.bfloat16()
    settings = {"gradient_checkpointing": False, **settings}
    module = sys.modules[trainer_class.__module__]
    with single_process(module):
        return begin_trainer(module, trainer_class, model, parent=prepare, **settings)


def adapters(model: Any) -> dict[str, Any]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" in name}


class Checkpoint:
    """What a trainer saves that has trained its adapter."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = peft_model()
        model.add_adapter("ref", model.peft_config["default"])
        number(model, 64)
        self.weights = adapters(model)
        # A card takes longer than all else here.
        with shadowed(model, "create_or_update_model_card", lambda folder: None):
            # With "auto" PEFT looks for the base model, on the network too.
            model.save_pretrained(str(folder), save_embedding_layers=False)

    def has(self, adapter: str, model: Any) -> bool:
        """Return whether the adapter of ``model`` is the one of this checkpoint."""
        found = adapters(model)
        names = [name for name in self.weights if f".{adapter}." in name]
        return all(found[name].float().equal(self.weights[name]) for name in names)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return Checkpoint(tmp_path)


@pytest.mark.parametrize("as_path", [True, False], ids=["a path", "a string"])
def test_a_resumed_run_has_both_adapters(trainer_class: Any, checkpoint: Checkpoint, as_path: bool) -> None:
    trainer = trainer_of(trainer_class)
    trainer._load_from_checkpoint(checkpoint.folder if as_path else str(checkpoint.folder))
    assert checkpoint.has("default", trainer.model)
    assert checkpoint.has("ref", trainer.model)


def test_transformers_passes_over_the_trained_adapter(trainer_class: Any, checkpoint: Checkpoint, switch: Any) -> None:
    with switch.off():
        trainer = trainer_of(trainer_class)
        trainer._load_from_checkpoint(str(checkpoint.folder))
    assert not checkpoint.has("default", trainer.model)
    assert checkpoint.has("ref", trainer.model)


def test_what_is_trained_and_its_dtypes_stay(trainer_class: Any, checkpoint: Checkpoint) -> None:
    trainer = trainer_of(trainer_class)
    trainer._load_from_checkpoint(str(checkpoint.folder))
    for name, weight in trainer.model.named_parameters():
        assert weight.requires_grad is (".default." in name), name
        assert (weight.dtype is torch.bfloat16) is ("lora_A.default" in name), name


def test_each_trainer_is_resumed(trainer_class: Any, checkpoint: Checkpoint) -> None:
    trainers = trainer_of(trainer_class), trainer_of(trainer_class)
    for trainer in trainers:
        trainer._load_from_checkpoint(str(checkpoint.folder))
    assert all(checkpoint.has("default", trainer.model) for trainer in trainers)


def test_an_adapter_that_is_not_trained_is_not_loaded(trainer_class: Any, checkpoint: Checkpoint) -> None:
    trainer = trainer_of(trainer_class, active="other")
    trainer._load_from_checkpoint(checkpoint.folder)
    assert not checkpoint.has("default", trainer.model)
    assert trainer.model.active_adapters == ["other"]


def test_a_model_of_fsdp_loads_its_own(trainer_class: Any, checkpoint: Checkpoint) -> None:
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(trainer_class, load=lambda *args: calls.append(args))
    trainer._load_from_checkpoint(str(checkpoint.folder), trainer.model)
    assert calls == [(str(checkpoint.folder), trainer.model)]
    assert not checkpoint.has("default", trainer.model)


@pytest.mark.parametrize("missing", ["beside the folder", "in a folder"])
def test_only_an_adapter_that_is_passed_over_is_loaded(
    trainer_class: Any, checkpoint: Checkpoint, missing: str
) -> None:
    """A method of the user's loads nothing here."""
    calls: list[tuple[Any, ...]] = []
    trainer = trainer_of(trainer_class, load=lambda *args: calls.append(args))
    (weights,) = checkpoint.folder.glob("adapter_model.*")
    alone = checkpoint.folder / "other" / "ref"
    alone.mkdir()
    weights.rename(alone / weights.name)
    folder = checkpoint.folder if missing == "beside the folder" else alone
    trainer._load_from_checkpoint(folder)
    assert calls == [(folder,)]
    assert not checkpoint.has("default", trainer.model)


def test_a_trainer_without_a_reference_loads_as_transformers_does(trainer_class: Any) -> None:
    if trainer_class.__name__ != "GRPOTrainer":
        pytest.skip("this trainer always has a reference")
    trainer = trainer_of(trainer_class, beta=0.0)
    assert "ref" not in trainer.model.peft_config
    assert "_load_from_checkpoint" not in vars(trainer)
