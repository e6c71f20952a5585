"""The reference is a copy of the active adapter, whatever its name, and the model is left as the trainer found it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_hotfix.testing import StopConstruction, base_for_adapters, begin_trainer, single_process

from tiny.trainers import classes_with_a_reference_adapter, methods_with_a_reference_adapter

each_method = pytest.mark.parametrize("method", methods_with_a_reference_adapter())


def lora(**settings: Any) -> LoraConfig:
    return LoraConfig(**{"r": 1, "target_modules": ["q_proj", "v_proj"], **settings})


def model_with(*adapters: str, active: str, **settings: Any) -> Any:
    """Return a model with these adapters, of which the active one has rank 2. All numbers differ."""
    configs = {name: lora(r=2, **settings) if name == active else lora(**settings) for name in adapters}
    first, *others = adapters
    model = get_peft_model(base_for_adapters(), configs[first], adapter_name=first)
    for name in others:
        model.add_adapter(name, configs[name])
    model.set_adapter(active)
    for number, weight in enumerate(model.parameters()):
        weight.data = torch.cos(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
    return model


def made(method: str, model: Any, meanwhile: Callable[[Any], None] = lambda model: None) -> Any:
    """Return a trainer of this model, that is made up to the constructor of transformers."""

    def stop(trainer: Any) -> None:
        meanwhile(trainer.model)
        raise StopConstruction

    trainer_class, _ = classes_with_a_reference_adapter(method)
    module = sys.modules[trainer_class.__module__]
    with single_process(module):
        return begin_trainer(module, trainer_class, model, parent=stop, gradient_checkpointing=False)


def weights_of(model: Any, adapter: str) -> list[Any]:
    """Return copies of the weights of an adapter that no module has the name of."""
    return [weight.detach().clone() for name, weight in model.named_parameters() if adapter in name.split(".")]


def is_copy(model: Any, adapter: str, number: int = 4) -> bool:
    """Return whether the adapter "ref" has the weights of this one, so many."""
    pairs = list(zip(weights_of(model, "ref"), weights_of(model, adapter), strict=True))
    return len(pairs) == number and all(one.equal(other) for one, other in pairs)


@each_method
@pytest.mark.parametrize("adapters", [("policy",), ("before", "policy"), ("policy", "behind"), ("a", "policy", "b")])
def test_the_reference_is_a_copy_of_the_active_adapter(method: str, adapters: tuple[str, ...]) -> None:
    model = model_with(*adapters, active="policy")
    made(method, model)
    assert is_copy(model, "policy")
    assert model.peft_config["ref"].r == 2


@each_method
def test_trl_fails(method: str, switch: Any) -> None:
    with switch.off(), pytest.raises(KeyError, match="'default'"):
        made(method, model_with("policy", active="policy"))


@each_method
@pytest.mark.parametrize(
    ("settings", "number"),
    [({"target_modules": ["embed_tokens", "q_proj"]}, 4), ({"modules_to_save": ["k_proj"]}, 5)],
    ids=["embeddings", "modules to save"],
)
def test_weights_outside_of_linear_adapters_are_copied(method: str, settings: dict[str, Any], number: int) -> None:
    model = model_with("policy", active="policy", **settings)
    made(method, model)
    assert is_copy(model, "policy", number)


@each_method
def test_an_adapter_may_have_the_name_of_a_module(method: str) -> None:
    model = model_with("before", "self_attn", active="self_attn")
    made(method, model)
    weights = dict(model.named_parameters())
    copies = [name for name in weights if ".ref." in name]
    assert len(copies) == 4
    for name in copies:
        assert weights[name].equal(weights[name.replace(".ref.", ".self_attn.")])


@each_method
def test_each_trainer_has_a_copy_of_its_own_adapter(method: str) -> None:
    first, second = model_with("one", active="one"), model_with("one", "two", active="two")
    made(method, first)
    made(method, second)
    assert is_copy(first, "one")
    assert is_copy(second, "two")


def is_untouched(model: Any) -> bool:
    return "add_adapter" not in vars(model) and type(getattr(model, "peft_config", {})) is dict


@each_method
@pytest.mark.parametrize("active", ["default", "policy"])
def test_trl_copies_the_adapter_called_default_whichever_is_active(method: str, active: str) -> None:
    model, untouched = model_with("policy", "default", active=active), []
    made(method, model, lambda model: untouched.append(is_untouched(model)))
    assert is_copy(model, "default")
    assert untouched == [True]


@each_method
def test_a_model_without_an_adapter_is_trls(method: str) -> None:
    untouched: list[bool] = []
    made(method, base_for_adapters(), lambda model: untouched.append(is_untouched(model)))
    assert untouched == [True]


@each_method
def test_the_adapters_of_the_user_stay_as_they_are(method: str) -> None:
    model = model_with("before", "policy", "behind", active="policy")
    before = {name: (weight.detach().clone(), weight.requires_grad) for name, weight in model.named_parameters()}
    made(method, model)
    after = dict(model.named_parameters())
    for name, (weight, is_trained) in before.items():
        assert after[name].equal(weight)
        assert after[name].requires_grad is is_trained
    assert model.active_adapter == "policy"


@each_method
def test_only_the_adapter_ref_is_a_copy(method: str) -> None:
    model = model_with("policy", active="policy")
    made(method, model, lambda model: model.add_adapter("later", lora(r=2)))
    assert not any(weight.any() for name, weight in model.named_parameters() if "lora_B.later" in name)
    assert is_copy(model, "policy")


@each_method
def test_the_model_has_no_adapter_called_default_meanwhile(method: str) -> None:
    found: list[Any] = []

    def look(model: Any) -> None:
        found.extend(["default" in model.peft_config, list(model.peft_config), model.peft_config["policy"].r])
        with pytest.raises(KeyError, match="'missing'"):
            model.peft_config["missing"]

    made(method, model_with("before", "policy", active="policy"), look)
    assert found == [False, ["before", "policy", "ref"], 2]


@each_method
def test_the_model_has_its_own_adapters_and_method_afterwards(method: str) -> None:
    model = model_with("policy", active="policy")
    adapters, add_adapter = model.peft_config, model.add_adapter.__func__
    made(method, model, lambda model: model.add_adapter("later", lora(r=2)))
    assert model.peft_config is adapters
    assert type(adapters) is dict
    assert list(adapters) == ["policy", "ref", "later"]
    assert model.add_adapter.__func__ is add_adapter
