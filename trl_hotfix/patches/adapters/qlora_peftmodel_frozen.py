"""A quantised ``PeftModel`` that is passed to a trainer is frozen, adapters included.

Trainers call peft's ``prepare_model_for_kbit_training``, which is meant for a model without adapters and freezes every
parameter, for a ``PeftModel`` too. With gradient checkpointing the output of the embeddings requires a gradient, so the
backward pass does not fail, although no parameter is trained.

TRL 0.23.1 (pull request 4081) does not prepare a ``PeftModel``. The wrapper makes the parameters that were trainable
before trainable again, by name, and so unfreezes neither a second, frozen adapter nor the weights beneath
``modules_to_save``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent_on, judge, wrapper
from ...model import Outcome, Verdict


@wrapper
def keep_what_is_trained(call: Call) -> Any:
    """Prepare a ``PeftModel``, and make the parameters that were trainable before trainable again."""
    from peft import PeftModel

    model = call["model"]
    if not isinstance(model, PeftModel) or call["peft_config"] is not None:
        return call()
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model = call()
    for name, weight in model.named_parameters():
        if name in trainable and not weight.requires_grad:
            weight.requires_grad_(True)
            call.act()
    return model


@absent_on(ValueError, "Expected PeftConfig object", "this release prepares no PeftModel that it is handed")
def adapter_of_a_quantised_model_is_trained(module: ModuleType) -> Outcome:
    """Check which weights of models that are marked as loaded in 4 bits are trained after they are prepared.

    Of two adapters one is trained, and the copy of a layer in ``modules_to_save``: four weights.
    """
    prepared = _prepare(module, model := _quantised_peft_model())
    trained = _trained(prepared)
    if not trained <= _TRAINED or prepared is not model:
        raise AssertionError(f"{sorted(trained - _TRAINED)} was not trained before")
    outcome = judge(len(trained), right=4, wrong=0)
    if outcome.verdict is Verdict.FIXED and (mistakes := _mistakes_elsewhere(module)):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong with other models: a second one, one that is not trained, and one without an adapter."""
    from peft import LoraConfig, get_peft_model

    second, frozen, base = _quantised_peft_model(), _quantised_peft_model(), _quantised(_base())
    for weight in frozen.parameters():
        weight.requires_grad_(False)
    expected = {"a second model": (second, _TRAINED), "a frozen model": (frozen, set()), "no adapter": (base, set())}
    trained = {name: _trained(_prepare(module, model)) for name, (model, _) in expected.items()}
    mistakes = [f"{name}: {sorted(names)} are trained" for name, names in trained.items() if names != expected[name][1]]
    mistakes += [f"{name} is not prepared" for name, (model, _) in expected.items() if not model.checkpointing]
    # peft would look for bitsandbytes if these models were marked.
    if (names := _trained(_prepare(module, _base(), _lora()))) != _TRAINED:
        mistakes.append(f"a new adapter: {sorted(names)} are trained")
    # SFTTrainer of 0.20 and 0.21 puts the new adapter around the old one, which then has other names.
    if hasattr(module, "prepare_peft_model"):
        with_bias = get_peft_model(_base(), LoraConfig(r=1, target_modules=["inner"], bias="all"))
        # The method of peft shows a progress bar, whose thread stays.
        with_bias.merge_and_unload = _base
        if (names := _trained(_prepare(module, with_bias, _lora()))) != _TRAINED:
            mistakes.append(f"a new adapter in the place of another one: {sorted(names)} are trained")
    return mistakes


_TRAINED = {f"base_model.model.{name}.weight" for name in ("inner.lora_A.default", "inner.lora_B.default")} | {
    f"base_model.model.head.modules_to_save.default.{name}" for name in ("weight", "bias")
}


def _prepare(module: ModuleType, model: Any, peft_config: Any = None) -> Any:
    """Call the method, which reads nothing of its trainer."""
    import dataclasses

    @dataclasses.dataclass
    class Arguments:
        bf16: bool = False
        gradient_checkpointing: bool = True
        gradient_checkpointing_kwargs: Any = None

    trainer = getattr(module, "SFTTrainer", None)
    prepare = module.prepare_peft_model if trainer is None else object.__new__(trainer)._prepare_peft_model
    return prepare(model, peft_config, Arguments())


def _trained(model: Any) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=1, target_modules=["inner"], modules_to_save=["head"])


def _base() -> Any:
    import torch

    class Base(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
            self.checkpointing = False

        # Methods of transformers' models that gradient checkpointing calls.
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None:
            self.checkpointing = True

        def enable_input_require_grads(self) -> None: ...

    return Base()


def _quantised(model: Any) -> Any:
    model.is_loaded_in_4bit = True
    return model


def _quantised_peft_model() -> Any:
    """Return a model with a trained adapter and a frozen one."""
    from peft import get_peft_model

    model = get_peft_model(_base(), _lora())
    model.add_adapter("ref", _lora())
    model.set_adapter("default")
    # If the flag were set earlier, peft would look for bitsandbytes.
    _quantised(model.base_model.model)
    if _trained(model) != _TRAINED:
        raise AssertionError(f"peft trains {sorted(_trained(model))}")
    return model
