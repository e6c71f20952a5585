"""The adapter "ref" is a copy of all of the adapter "default", and nothing else is changed."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model

from trl_hotfix.testing import StopConstruction, base_for_adapters, begin_trainer, single_process

MODULES = (
    *(f"trl.trainer.{method}_trainer" for method in ("grpo", "rloo", "dpo", "kto")),
    "trl.experimental.kto.kto_trainer",
)

LINEAR = LoraConfig(r=1, target_modules=["q_proj"])
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "LoRA of embeddings": (LoraConfig(r=1, target_modules=["embed_tokens", "q_proj"]), {"lora_embedding_A": 0.0}),
    "IA3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), {"ia3_l": 1.0}),
    "VeRA": (VeraConfig(r=2, target_modules=["q_proj"]), {"vera_lambda_b": 0.0, "vera_lambda_d": 0.1}),
}
"""Adapters, and the weights that each has when it is new. TRL does not copy them."""

each_kind = pytest.mark.parametrize(("config", "new"), KINDS.values(), ids=KINDS)


def trainer_class_of(module: ModuleType) -> Any:
    return getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer", None)


@pytest.fixture(params=MODULES, ids=lambda name: name.removeprefix("trl."))
def module(request: pytest.FixtureRequest) -> ModuleType:
    try:
        found = importlib.import_module(request.param)
    except ImportError:
        pytest.skip("this release has no such module")
    trainer_class = trainer_class_of(found)
    if trainer_class is None or trainer_class.__module__ != found.__name__:
        pytest.skip("this release has the trainer in another module")
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        pytest.skip("this trainer makes no adapter of its own")
    return found


class Made:
    """A model with the adapters "default" and "other", whose trainer is made up to its superclass's constructor."""

    def __init__(self, module: ModuleType, config: Any) -> None:
        base = base_for_adapters()
        base.register_parameter("default", torch.nn.Parameter(torch.tensor(7.0)))
        self.config, self.model = config, get_peft_model(base, config)
        self.model.add_adapter("other", config)
        for place, (name, weight) in enumerate(self.model.named_parameters()):
            if {"default", "other"} & {*name.split(".")}:
                weight.data.copy_(2 + place + torch.cos(torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape))
        self.before = {
            name: (weight.detach().clone(), weight.requires_grad) for name, weight in self.model.named_parameters()
        }
        self.at_once: dict[str, Any] = {}
        trainer_class = trainer_class_of(module)
        with single_process(module):
            begin_trainer(module, trainer_class, self.model, parent=self._add_another, gradient_checkpointing=False)

    def _add_another(self, trainer: Any) -> None:
        """Train the reference's adapter, and add one more."""
        for name, weight in self.weights_of("ref").items():
            self.at_once[name] = weight.detach().clone()
            weight.data += 1
        trainer.model.add_adapter("later", self.config)
        raise StopConstruction

    def weights_of(self, adapter: str) -> dict[str, Any]:
        return {name: weight for name, weight in self.model.named_parameters() if adapter in name.split(".")}

    def default_of(self, copy: str, adapter: str = "ref") -> Any:
        """Return the weight of the adapter "default" beside this one."""
        return self.before[".".join("default" if part == adapter else part for part in copy.split("."))][0]


@each_kind
def test_each_weight_of_the_reference_is_that_of_the_adapter(module: ModuleType, config: Any, new: Any) -> None:
    made = Made(module, config)
    assert made.at_once
    for name, weight in made.at_once.items():
        assert weight.equal(made.default_of(name)), name


@each_kind
def test_trl_leaves_some_weights_as_new(module: ModuleType, config: Any, new: dict[str, float], switch: Any) -> None:
    with switch.off():
        made = Made(module, config)
    for part, value in new.items():
        left = [weight for name, weight in made.at_once.items() if f".{part}." in name]
        assert left
        assert all((weight == value).all() for weight in left)


def test_lora_of_linear_layers_is_copied_as_trl_does(module: ModuleType) -> None:
    made = Made(module, LINEAR)
    for name, weight in made.at_once.items():
        assert weight.equal(made.default_of(name)), name


@each_kind
def test_what_the_model_had_before_is_as_it_was(module: ModuleType, config: Any, new: Any) -> None:
    made = Made(module, config)
    after = dict(made.model.named_parameters())
    for name, (weight, is_trained) in made.before.items():
        assert after[name].equal(weight), name
        assert after[name].requires_grad is is_trained, name
    assert "add_adapter" not in vars(made.model)


@each_kind
def test_the_reference_is_copied_once(module: ModuleType, config: Any, new: Any) -> None:
    made = Made(module, config)
    after = dict(made.model.named_parameters())
    assert all(after[name].equal(weight + 1) for name, weight in made.at_once.items())


@each_kind
def test_an_adapter_that_is_added_later_is_new(module: ModuleType, config: Any, new: dict[str, float]) -> None:
    made = Made(module, config)
    for part, value in new.items():
        later = [weight for name, weight in made.weights_of("later").items() if f".{part}." in name]
        assert later
        assert all((weight == value).all() for weight in later)


def test_each_trainer_has_a_copy(module: ModuleType) -> None:
    config, _ = KINDS["LoRA of embeddings"]
    for _ in range(2):
        made = Made(module, config)
        assert all(weight.equal(made.default_of(name)) for name, weight in made.at_once.items())


def test_a_model_without_an_adapter_is_left_as_it_is(module: ModuleType) -> None:
    def check(trainer: Any) -> None:
        assert "add_adapter" not in vars(trainer.model)
        raise StopConstruction

    trainer_class = trainer_class_of(module)
    with single_process(module):
        begin_trainer(module, trainer_class, base_for_adapters(), parent=check, gradient_checkpointing=False)
