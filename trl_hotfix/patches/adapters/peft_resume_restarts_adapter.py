"""A resumed run on a ``PeftModel`` trains its adapter from the beginning.

The trainers give a model with a trained adapter a second one, "ref". PEFT saves the adapter "default" in the folder of
a checkpoint, and any other in a folder within it. Where there is such a folder, ``Trainer._load_from_checkpoint`` of
transformers loads the adapters in these folders and not the one beside them. Step, optimizer and scheduler go on.
transformers 5.23.0 loads both.

The method is not TRL's, so the trainer is given one of its own that calls it, after the constructor: what datasets hash
there is not changed. The weights are copied into the parameters. ``load_adapter`` would make those of bfloat16 float32.
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act_of_this_call, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import base_for_adapters, begin_trainer, single_process


def load_the_trained_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer. If its model has an adapter "ref", a resumed run loads the adapter "default" too."""
    wrapped(*args, **kwargs)
    if "ref" in getattr(instance.model, "peft_config", ()):
        load = instance._load_from_checkpoint
        instance._load_from_checkpoint = functools.partial(_load, instance, load, act_of_this_call())


def _load(
    trainer: Any, load: Callable[..., None], act: Callable[[], None], resume_from_checkpoint: Any, model: Any = None
) -> None:
    """Load a checkpoint as before, and the adapter "default" if it is trained and was passed over.

    Where a ``model`` is given, it is one of FSDP or SageMaker, which load what they have saved themselves.
    """
    load(resume_from_checkpoint, *(() if model is None else (model,)))
    folder = Path(resume_from_checkpoint)
    passed_over = any(folder.glob("*/adapter_model.*")) and any(folder.glob("adapter_model.*"))
    if model is None and passed_over and "default" in trainer.model.active_adapters:
        from peft import load_peft_weights, set_peft_model_state_dict

        # The weights are those of the adapter "default" if no other is named.
        set_peft_model_state_dict(trainer.model, load_peft_weights(str(folder)))
        act()


def resumed_run_has_the_trained_adapter(module: ModuleType) -> Outcome:
    """Load a checkpoint as a resumed run does, and judge how far its adapter is from the one in the checkpoint.

    With the bug it is the one that the trainer was made with.
    """
    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    # The constructor may be wrapped.
    if "ref" not in inspect.unwrap(trainer_class.__init__).__code__.co_consts:
        return absent("in this release this trainer makes no adapter of its own")
    with single_process(module), tempfile.TemporaryDirectory() as folder:
        checkpoint = _checkpoint(folder)
        trainer = _trainer(module, trainer_class)
        begin = _adapters(trainer.model)
        trainer._load_from_checkpoint(folder)
        loaded = _adapters(trainer.model)
        if "_load_from_checkpoint" not in vars(trainer) and not _distance(loaded, checkpoint, "default"):
            return absent("transformers loads both adapters")
        distance, moved = (_distance(weights, checkpoint, "default") for weights in (loaded, begin))
        outcome = judge(distance, right=0.0, wrong=moved)
        mistakes = [*_mistakes(trainer.model, checkpoint)]
        if outcome.verdict is Verdict.FIXED:
            mistakes += _mistakes_elsewhere(module, trainer_class, folder)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes(model: Any, checkpoint: dict[str, Any]) -> Iterator[str]:
    """Yield what is wrong with a model whose adapters were loaded, besides the weights of the adapter "default"."""
    if _distance(_adapters(model), checkpoint, "ref"):
        yield "the adapter ref is not that of the checkpoint"
    for name, weight in model.named_parameters():
        if weight.requires_grad is not (".default." in name):
            yield f"requires_grad of {name} is {weight.requires_grad}"
        if ("bfloat16" in str(weight.dtype)) is not ("lora_A.default" in name):
            yield f"{name} has become {weight.dtype}"


def _mistakes_elsewhere(module: ModuleType, trainer_class: Any, folder: str) -> Iterator[str]:
    """Yield what is wrong with trainers whose adapter is not to be loaded.

    One has a method of a user's, which loads nothing.
    """
    calls: list[tuple[Any, ...]] = []
    of_a_user = _trainer(module, trainer_class, load=lambda *args: calls.append(args))
    trainer = _trainer(module, trainer_class, active="other")
    begin = _adapters(trainer.model)

    def is_loaded(trainer: Any) -> bool:
        return _distance(_adapters(trainer.model), begin, "default") > 0.0

    of_a_user._load_from_checkpoint(folder, of_a_user.model)
    if is_loaded(of_a_user):
        yield "an adapter is loaded into the model of FSDP"
    trainer._load_from_checkpoint(Path(folder))
    if is_loaded(trainer) or trainer.model.active_adapters != ["other"]:
        yield "an adapter that is not trained is loaded"
    if trainer_class.__name__ == "GRPOTrainer":
        trainer = _trainer(module, trainer_class, beta=0.0)
        if "ref" in trainer.model.peft_config or "_load_from_checkpoint" in vars(trainer):
            yield "a trainer without a reference is changed"
    (weights,) = Path(folder).glob("adapter_model.*")
    alone = Path(folder, "other", "ref")
    alone.mkdir()
    weights.rename(alone / weights.name)
    for checkpoint in (Path(folder), alone):
        of_a_user._load_from_checkpoint(checkpoint)
        if is_loaded(of_a_user):
            yield f"an adapter is loaded from {checkpoint}, where it is missing or not passed over"
    if calls != [(folder, of_a_user.model), (Path(folder),), (alone,)]:
        yield f"the method of the user is called with {calls}"


def _trainer(
    module: ModuleType, trainer_class: Any, *, active: str = "default", load: Any = None, **settings: Any
) -> Any:
    """Return a trainer of a model with the adapters "default" and "other", and usually "ref"."""

    def prepare(trainer: Any) -> None:
        if load is not None:
            trainer._load_from_checkpoint = load
        trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
        ignore = dict.fromkeys(("add_callback", "remove_callback"), lambda callback: None)
        trainer.callback_handler = SimpleNamespace(**ignore, callbacks=[])

    model = _peft_model()
    model.set_adapter(active)
    for name, weight in model.named_parameters():
        if "lora_A.default" in name:
            weight.data = weight.data.bfloat16()
    settings = {"gradient_checkpointing": False, **settings}
    return begin_trainer(module, trainer_class, model, parent=prepare, **settings)


def _peft_model() -> Any:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(base_for_adapters(), LoraConfig(r=1, target_modules=["q_proj"]))
    model.add_adapter("other", LoraConfig(r=1, target_modules=["q_proj"]))
    _number(model, 0)
    return model


def _number(model: Any, first: int) -> None:
    """Set the weights of all adapters to numbers that are the same in bfloat16."""
    import torch

    for place, weight in enumerate(weight for name, weight in model.named_parameters() if "lora_" in name):
        weight.data.copy_(first + 8 * place + torch.arange(weight.numel()).reshape(weight.shape))


def _checkpoint(folder: str) -> dict[str, Any]:
    """Save a model as a trainer does that has trained its adapter, and return the weights of its adapters."""
    model = _peft_model()
    model.add_adapter("ref", model.peft_config["default"])
    _number(model, 64)
    # A card takes longer than all else here.
    with shadowed(model, "create_or_update_model_card", lambda folder: None):
        # With "auto" PEFT looks for the base model, on the network too.
        model.save_pretrained(folder, save_embedding_layers=False)
    return _adapters(model)


def _adapters(model: Any) -> dict[str, Any]:
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "lora_" in name}


def _distance(weights: dict[str, Any], expected: dict[str, Any], adapter: str) -> float:
    """Return how far the weights of an adapter are from the expected ones."""
    names = [name for name in expected if f".{adapter}." in name]
    return max(float((weights[name] - expected[name]).abs().max()) for name in names)
