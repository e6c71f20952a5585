"""The reference of a ``PeftModel`` lacks what has been trained, if its adapter is not a plain LoRA of linear layers.

The trainers add an adapter "ref" and copy the parameters that have ``.default.`` in their names. PEFT keeps a matrix in
a module that has the name of the adapter, and then the name goes on with ``.weight``. A single parameter has the
name of the adapter itself, as ``lora_embedding_A.default`` or ``ia3_l.default``, and is passed over. There "ref"
keeps the values of an adapter that was just made.

The wrapper copies these as soon as the adapter is added: DPO and KTO may precompute the reference in the constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, agreed, judge, shadowed, wrapper
from ...model import Outcome, Verdict
from ...testing import StopConstruction, base_for_adapters, begin_trainer, single_process


@wrapper
def copy_every_weight(call: Call) -> None:
    """Make the trainer with a model whose adapter "ref" is given all weights of the adapter "default"."""
    from peft import PeftModel

    model = call["model"]
    if isinstance(model, PeftModel):
        act, add_adapter = call.act_later(), model.add_adapter

        def add_and_copy(adapter_name: str, *args: Any, **kwargs: Any) -> None:
            add_adapter(adapter_name, *args, **kwargs)
            if adapter_name == "ref":
                _copy(model, act)

        with shadowed(model, "add_adapter", add_and_copy):
            call()
    else:
        call()


def _copy(model: Any, act: Callable[[], None]) -> None:
    """Copy the parameters that have the name of the adapter "default" themselves to those of the adapter "ref"."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        copy = weights.get(f"{name.removesuffix('.default')}.ref")
        # Other parameters have no such copy.
        if copy is not None:
            copy.data.copy_(weight.data)
            act()


def reference_has_every_weight(module: ModuleType) -> Outcome:
    """Judge how far the adapter "ref" of several kinds is from the adapter "default" that it should be a copy of.

    With the bug it has some weights of a new adapter.
    """
    from peft import IA3Config, LoraConfig, VeraConfig

    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    # The constructor may be wrapped.
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release this trainer makes no adapter of its own")
    embeddings = LoraConfig(r=1, target_modules=["embed_tokens", "q_proj"])
    scales = IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    vectors = VeraConfig(r=2, target_modules=["q_proj"])
    with single_process(module):
        outcome = _judged(module, trainer_class, embeddings, {"lora_embedding_A": 0.0})
        if outcome.verdict is Verdict.FIXED:
            others = (
                _judged(module, trainer_class, scales, {"ia3_l": 1.0}),
                _judged(module, trainer_class, vectors, {"vera_lambda_b": 0.0, "vera_lambda_d": 0.1}),
                # TRL copies all of it.
                _judged(module, trainer_class, LoraConfig(r=1, target_modules=["q_proj"]), {"lora_B": 0.0}),
            )
            agreed((outcome, *others))
            begin_trainer(module, trainer_class, base_for_adapters(), parent=_check, gradient_checkpointing=False)
    return outcome


def _judged(module: ModuleType, trainer_class: Any, config: Any, new: dict[str, float]) -> Outcome:
    """Judge the adapter "ref" of this kind. ``new`` has the weights of an adapter that was just made.

    There is an adapter "other" beside it. One is added later, when "ref" may have been changed.
    """
    import torch
    from peft import get_peft_model

    at_once: dict[str, Any] = {}

    def add_another(trainer: Any) -> None:
        for name, weight in model.named_parameters():
            if "ref" in name.split("."):
                at_once[name] = weight.detach().clone()
                weight.data += 1
        trainer.model.add_adapter("later", config)
        raise StopConstruction

    base = base_for_adapters()
    base.register_parameter("default", torch.nn.Parameter(torch.tensor(7.0)))
    model = get_peft_model(base, config)
    model.add_adapter("other", config)
    weights = {name: weight for name, weight in model.named_parameters() if {"default", "other"} & {*name.split(".")}}
    for place, weight in enumerate(weights.values()):
        weight.data.copy_(2 + place + torch.cos(torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape))
    before = {name: (weight.detach().clone(), weight.requires_grad) for name, weight in weights.items()}
    begin_trainer(module, trainer_class, model, parent=add_another, gradient_checkpointing=False)
    after = dict(model.named_parameters())
    changed = [name for name, (weight, is_trained) in before.items() if not after[name].equal(weight)]
    changed += [name for name, (weight, is_trained) in before.items() if after[name].requires_grad is not is_trained]
    changed += [name for name, weight in at_once.items() if not after[name].equal(weight + 1)]
    if changed or "add_adapter" in vars(model):
        raise AssertionError(f"the model is left with other {changed}, or with another method")
    copies = {name: ".".join("ref" if part == "default" else part for part in name.split(".")) for name in before}
    copies = {name: copy for name, copy in copies.items() if copy in at_once}
    first = {name: value for name in copies for part, value in new.items() if f".{part}." in name}
    if not all((after[name.replace(".default", ".later")] == value).all() for name, value in first.items()):
        raise AssertionError("an adapter that is added later is a copy")
    # What is drawn at random cannot be foretold.
    distance = max(_distance(at_once[copies[name]], before[name][0]) for name in first)
    if distance == 0.0:
        distance = max(_distance(at_once[copy], before[name][0]) for name, copy in copies.items())
    return judge(distance, right=0.0, wrong=max(_distance(before[name][0], value) for name, value in first.items()))


def _distance(weight: Any, expected: Any) -> float:
    return float((weight - expected).abs().max())


def _check(trainer: Any) -> None:
    if "add_adapter" in vars(trainer.model):
        raise AssertionError("a model without an adapter is changed")
    raise StopConstruction
