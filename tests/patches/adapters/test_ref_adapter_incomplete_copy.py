"""The adapter "ref" is a copy of all of the adapter "default", and nothing else is changed."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, VeraConfig, get_peft_model

from trl_hotfix.testing import StopConstruction, base_for_adapters, begin_trainer, single_process

from tiny.trainers import classes_with_a_reference_adapter, methods_with_a_reference_adapter

LINEAR = LoraConfig(r=1, target_modules=["q_proj"])
KINDS: dict[str, tuple[Any, dict[str, float]]] = {
    "LoRA of embeddings": (LoraConfig(r=1, target_modules=["embed_tokens", "q_proj"]), {"lora_embedding_A": 0.0}),
    "IA3": (IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]), {"ia3_l": 1.0}),
    "VeRA": (VeraConfig(r=2, target_modules=["q_proj"]), {"vera_lambda_b": 0.0, "vera_lambda_d": 0.1}),
}
"""Adapters, and the weights that each has when it is new. TRL does not copy them."""

each_kind = pytest.mark.parametrize(("config", "new"), KINDS.values(), ids=KINDS)


@pytest.fixture(params=methods_with_a_reference_adapter())
def trainer_class(request: pytest.FixtureRequest) -> Any:
    return classes_with_a_reference_adapter(request.param)[0]


def begin(trainer_class: Any, model: Any, parent: Any) -> None:
    """Make a trainer of this model, up to the constructor of transformers, whose place ``parent`` takes."""
    module = sys.modules[trainer_class.__module__]
    with single_process(module):
        begin_trainer(module, trainer_class, model, parent=parent, gradient_checkpointing=False)


class Made:
    """A model with the adapters "default" and "other", whose trainer is made up to its superclass's constructor."""

    def __init__(self, trainer_class: Any, config: Any) -> None:
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
        begin(trainer_class, self.model, self._add_another)

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
def test_each_weight_of_the_reference_is_that_of_the_adapter(trainer_class: Any, config: Any, new: Any) -> None:
    made = Made(trainer_class, config)
    assert made.at_once
    for name, weight in made.at_once.items():
        assert weight.equal(made.default_of(name)), name


@each_kind
def test_trl_leaves_some_weights_as_new(trainer_class: Any, config: Any, new: dict[str, float], switch: Any) -> None:
    with switch.off():
        made = Made(trainer_class, config)
    for part, value in new.items():
        left = [weight for name, weight in made.at_once.items() if f".{part}." in name]
        assert left
        assert all((weight == value).all() for weight in left)


def test_lora_of_linear_layers_is_copied_as_trl_does(trainer_class: Any) -> None:
    made = Made(trainer_class, LINEAR)
    for name, weight in made.at_once.items():
        assert weight.equal(made.default_of(name)), name


@each_kind
def test_what_the_model_had_before_is_as_it_was(trainer_class: Any, config: Any, new: Any) -> None:
    made = Made(trainer_class, config)
    after = dict(made.model.named_parameters())
    for name, (weight, is_trained) in made.before.items():
        assert after[name].equal(weight), name
        assert after[name].requires_grad is is_trained, name
    assert "add_adapter" not in vars(made.model)


@each_kind
def test_the_reference_is_copied_once(trainer_class: Any, config: Any, new: Any) -> None:
    made = Made(trainer_class, config)
    after = dict(made.model.named_parameters())
    assert all(after[name].equal(weight + 1) for name, weight in made.at_once.items())


@each_kind
def test_an_adapter_that_is_added_later_is_new(trainer_class: Any, config: Any, new: dict[str, float]) -> None:
    made = Made(trainer_class, config)
    for part, value in new.items():
        later = [weight for name, weight in made.weights_of("later").items() if f".{part}." in name]
        assert later
        assert all((weight == value).all() for weight in later)


def test_each_trainer_has_a_copy(trainer_class: Any) -> None:
    config, _ = KINDS["LoRA of embeddings"]
    for _ in range(2):
        made = Made(trainer_class, config)
        assert all(weight.equal(made.default_of(name)) for name, weight in made.at_once.items())


def test_a_model_without_an_adapter_is_left_as_it_is(trainer_class: Any) -> None:
    def check(trainer: Any) -> None:
        assert "add_adapter" not in vars(trainer.model)
        raise StopConstruction

    begin(trainer_class, base_for_adapters(), check)
