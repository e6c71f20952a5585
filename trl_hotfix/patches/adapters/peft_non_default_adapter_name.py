"""A trainer that is given a ``PeftModel`` fails unless its adapter is called "default".

The trainers give a model with a trained adapter a second one, "ref", a frozen copy of it. They take its configuration
from ``model.peft_config["default"]`` and its weights from the parameters that have ``.default.`` in their names. If
only the lookup were repaired, no weight would be copied, and the reference would be the base model.

So the wrapper does both while the trainer is made: ``peft_config`` is a dict that answers "default" with the
configuration of the active adapter and is unchanged otherwise, and the adapter "ref" that ``add_adapter`` makes is
given the weights of the active one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import StopConstruction, base_for_adapters, begin_trainer, single_process


def copy_the_active_adapter(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make the trainer with a model whose active adapter stands for the default one."""
    from peft import PeftModel

    model = argument(wrapped, args, kwargs, "model")
    if not isinstance(model, PeftModel) or "default" in model.peft_config:
        return wrapped(*args, **kwargs)
    active, add_adapter = model.active_adapter, model.add_adapter

    def add_and_copy(adapter_name: str, *args: Any, **kwargs: Any) -> Any:
        result = add_adapter(adapter_name, *args, **kwargs)
        if adapter_name == "ref":
            _copy(model, active, adapter_name)
        return result

    with _with_default(model, active), shadowed(model, "add_adapter", add_and_copy):
        return wrapped(*args, **kwargs)


class _WithDefault(dict[str, Any]):
    """Answers "default" with the configuration of the active adapter, and does not contain that key."""

    active = ""

    def __missing__(self, name: str) -> Any:
        if name != "default":
            raise KeyError(name)
        return self[self.active]


@contextmanager
def _with_default(model: Any, active: str) -> Iterator[None]:
    adapters = model.peft_config
    with_default = _WithDefault(adapters)
    with_default.active = active
    model.peft_config = with_default
    try:
        yield
    finally:
        # The adapters that the trainer added stay.
        adapters.update(with_default)
        model.peft_config = adapters


def _copy(model: Any, source: str, target: str) -> None:
    """Copy each weight of the adapter ``source`` to the adapter ``target``."""
    weights = dict(model.named_parameters())
    for name, weight in weights.items():
        parts = name.split(".")
        # An adapter may have the name of a module, so each occurrence is tried.
        for position in (index for index, part in enumerate(parts) if part == source):
            target_weight = weights.get(".".join([*parts[:position], target, *parts[position + 1 :]]))
            if target_weight is not None:
                target_weight.data.copy_(weight.data)


def reference_is_a_copy_of_the_adapter(module: ModuleType) -> Outcome:
    """Check that the LoRA matrices of "ref" are those of the adapter, whatever its name, in several trainers.

    With the bug the trainer cannot be made. Without a copy half of the matrices are 0.
    """
    trainer_class = getattr(module, module.__name__.rpartition(".")[2].removesuffix("_trainer").upper() + "Trainer")
    if not _makes_a_reference_adapter(trainer_class):
        return absent("in this release this trainer makes no adapter of its own")
    outcome = _judged(module, trainer_class, "policy", "policy")
    if outcome.verdict is Verdict.FIXED:
        # A module of the model has the first name. TRL copies an adapter called default whichever is active.
        others = [_judged(module, trainer_class, *names) for names in (("self_attn",) * 2, ("policy", "default"))]
        if any(other.verdict is not Verdict.FIXED for other in others):
            raise AssertionError(f"the adapters are not all copied: {others}")
    return outcome


def _judged(module: ModuleType, trainer_class: Any, adapter: str, original: str) -> Outcome:
    """Judge how far the adapter "ref" is from its original. ``adapter`` is active among three."""
    import torch
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=1, target_modules=["q_proj", "v_proj"])
    first = "before" if original == adapter else original
    model = get_peft_model(base_for_adapters(), lora, adapter_name=first)
    for name in (adapter, "behind"):
        model.add_adapter(name, LoraConfig(r=2 if name == adapter else 1, target_modules=["q_proj", "v_proj"]))
    model.set_adapter(adapter)
    weights = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    for number, weight in enumerate(weights.values()):
        weight.data = torch.cos(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
    untouched = {name: weight.detach().clone() for name, weight in weights.items()}

    def stop(trainer: Any) -> None:
        # Whatever else asks for an adapter or adds one meanwhile is answered by peft.
        if "default" in model.peft_config and original != "default":
            raise AssertionError("the model contains an adapter called default")
        try:
            raise AssertionError(f"an adapter that does not exist has {model.peft_config['missing']}")
        except KeyError:
            model.add_adapter("later", LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        raise StopConstruction

    adapters, add_adapter = model.peft_config, type(model).add_adapter
    try:
        with single_process(module):
            begin_trainer(module, trainer_class, model, parent=stop, gradient_checkpointing=False)
    except KeyError as error:
        if error.args != ("default",):
            raise
        return judge(1.0, right=0.0, wrong=1.0, error=repr(error))
    names = [first, adapter, "behind", "ref", "later"]
    if model.peft_config is not adapters or list(adapters) != names or model.active_adapter != adapter:
        raise AssertionError(f"the model is left with {model.peft_config}, and {model.active_adapter!r} is active")
    if type(adapters) is not dict or getattr(model.add_adapter, "__func__", None) is not add_adapter:
        raise AssertionError(f"the model is left with {type(adapters)} and {model.add_adapter}")
    after = dict(model.named_parameters())
    if any(not after[name].equal(weight) for name, weight in untouched.items()):
        raise AssertionError("an adapter of the user's is changed")
    if any(weight.any() for name, weight in after.items() if "lora_B.later" in name):
        raise AssertionError("an adapter that is added later is a copy")
    pairs = [
        (weight, untouched[name.replace(".ref.", f".{original}.")]) for name, weight in after.items() if ".ref." in name
    ]
    if len(pairs) != 4:
        raise AssertionError(f"the adapter ref has {len(pairs)} matrices")
    return judge(max(float((weight - own).abs().max()) for weight, own in pairs), right=0.0, wrong=1.0)


def _makes_a_reference_adapter(trainer_class: Any) -> bool:
    """Return whether ``__init__``, which may be wrapped, contains the name "ref"."""
    constants = inspect.unwrap(trainer_class.__init__).__code__.co_consts
    return "ref" in constants
