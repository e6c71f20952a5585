"""What a checkpoint has by another name is restored, and what it has not stays as it is."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import TrainingArguments

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.versions import in_range
from trl_hotfix.testing import default_arguments, stub_trainer

import tiny
from tiny.vision import llava

ID = "resume-leaves-tensors-unrestored"
(PATCH,) = (patch for patch in loading.load() if patch.id == ID)
TARGETS = {target.attribute: target for target in gates.targets_here(PATCH)}
MODELS = {"Llava": lambda folder, seed: llava(seed=seed)}
if in_range(transformers.__version__, ">=5"):
    MODELS["Mixtral"] = lambda folder, seed: tiny.mixtral(folder, seed=seed, coefficient=0.1)


FIRST_CLASS = next(iter(TARGETS)).partition(".")[0]


@pytest.fixture(params=["_load_from_checkpoint", "_load_best_model"])
def target(request: pytest.FixtureRequest) -> Any:
    """Each method that loads a checkpoint, of one class."""
    return TARGETS[f"{FIRST_CLASS}.{request.param}"]


@pytest.fixture(params=list(MODELS))
def make(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]


def trainer_of(target: Any, model: Any) -> Any:
    trainer_class = getattr(import_module(target.module), target.attribute.partition(".")[0])
    trainer = stub_trainer(
        trainer_class,
        default_arguments(TrainingArguments, save_safetensors=True),
        model=model,
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
        said=[],
    )
    trainer._issue_warnings_after_load = lambda loaded: trainer.said.append(
        (set(loaded.missing_keys), set(loaded.unexpected_keys))
    )
    return trainer


def load(target: Any, model: Any, folder: Path) -> Any:
    """Load a checkpoint into ``model`` by this method, and return the trainer."""
    trainer = trainer_of(target, model)
    say = trainer._issue_warnings_after_load
    if target.attribute.endswith("_best_model"):
        trainer.state = SimpleNamespace(best_model_checkpoint=str(folder), best_metric=1.0)
        trainer._load_best_model()
    else:
        trainer._load_from_checkpoint(str(folder))
    assert trainer._issue_warnings_after_load is say
    return trainer


def different(model: Any, other: Any) -> set[str]:
    others = other.state_dict()
    return {name for name, value in model.state_dict().items() if not value.equal(others[name])}


@pytest.mark.parametrize("size", ["5GB", "10KB"], ids=["one file", "shards"])
def test_all_weights_are_those_that_were_saved(target: Any, make: Any, size: str, tmp_path: Path, switch: Any) -> None:
    saved, model, unpatched = make(tmp_path, 0), make(tmp_path, 1), make(tmp_path, 1)
    saved.save_pretrained(tmp_path / "checkpoint", max_shard_size=size)
    trainer = load(target, model, tmp_path / "checkpoint")
    assert not different(model, saved)
    assert trainer.said == [(set(), set())]
    assert tiny.acts(ID, target.name, trainer) == 1
    with switch.off():
        load(target, unpatched, tmp_path / "checkpoint")
    assert different(unpatched, saved)


@pytest.mark.parametrize("attribute", list(TARGETS))
def test_each_class_restores_what_is_missing(attribute: str, tmp_path: Path) -> None:
    saved, model = llava(seed=0), llava(seed=1)
    saved.save_pretrained(tmp_path)
    load(TARGETS[attribute], model, tmp_path)
    assert not different(model, saved)


def test_names_and_dtypes_stay_those_of_the_model(target: Any, make: Any, tmp_path: Path) -> None:
    saved, model = make(tmp_path, 0), make(tmp_path, 1).to(torch.bfloat16)
    saved.save_pretrained(tmp_path / "checkpoint")
    parameters = dict(model.named_parameters())
    load(target, model, tmp_path / "checkpoint")
    assert all(value is parameters[name] for name, value in model.named_parameters())
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert not different(model, saved.to(torch.bfloat16))


def test_what_the_checkpoint_has_not_is_left_and_said(target: Any, tmp_path: Path) -> None:
    saved, model = llava(seed=0), llava(seed=1)
    saved.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (lost,) = (name for name in tensors if name.endswith("layers.0.mlp.up_proj.weight"))
    del tensors[lost]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (name,) = (name for name in model.state_dict() if name.endswith("layers.0.mlp.up_proj.weight"))
    before = model.state_dict()[name].clone()
    trainer = load(target, model, tmp_path)
    assert different(model, saved) == {name}
    assert model.state_dict()[name].equal(before)
    assert trainer.said == [({name}, set())]


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
def test_a_checkpoint_of_the_names_of_the_model_is_loaded_as_before(target: Any, tied: bool, tmp_path: Path) -> None:
    saved, model = (tiny.llama(str(tmp_path), seed=seed) for seed in (0, 1))
    for each in (saved, model):
        each.config.tie_word_embeddings = tied
        each.tie_weights()
    saved.save_pretrained(tmp_path / "checkpoint")
    model.from_pretrained = None  # It is not called.
    trainer = load(target, model, tmp_path / "checkpoint")
    assert not different(model, saved)
    assert trainer.said == [({"lm_head.weight"} if tied else set(), set())]
    assert not tiny.acts(ID, target.name, trainer)


def test_a_model_of_torch_is_left_alone(target: Any, tmp_path: Path) -> None:
    model = torch.nn.Linear(1, 1, bias=False)
    save_file({"other": torch.ones(1)}, tmp_path / "model.safetensors")
    trainer = load(target, model, tmp_path)
    assert trainer.said == [({"weight"}, {"other"})]
    assert not tiny.acts(ID, target.name, trainer)


def test_a_checkpoint_that_cannot_be_loaded_is_an_error_as_before(target: Any, tmp_path: Path) -> None:
    model = llava(seed=0)
    model.save_pretrained(tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"")
    trainer = trainer_of(target, model)
    say = trainer._issue_warnings_after_load
    trainer.state = SimpleNamespace(best_model_checkpoint=str(tmp_path), best_metric=1.0)
    method = getattr(trainer, target.attribute.partition(".")[2])
    with pytest.raises(Exception, match="header"):
        method() if target.attribute.endswith("_best_model") else method(str(tmp_path))
    assert trainer._issue_warnings_after_load is say
