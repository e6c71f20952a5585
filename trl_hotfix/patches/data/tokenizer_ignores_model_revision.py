"""A trainer loads its tokenizer from the main branch, whatever revision the model has.

The trainers load a model that is given by its name with ``args.model_init_kwargs``, and its tokenizer or processor with
``AutoTokenizer`` or ``AutoProcessor`` by the name alone. GRPO and RLOO load reward models with the same arguments, and
their tokenizers by their names. TRL 1.13.0 passes the revision on in both places.

Which of the two classes loads it, and on which side it pads and truncates, differs between releases. So the wrapper
lets TRL make the calls: meanwhile the two classes in the trainer's module add the revision to those whose turn it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import StopConstruction, absent_if_reexported, default_arguments, single_process

_LOADERS = ("AutoTokenizer", "AutoProcessor")


@wrapper
def load_at_the_revision_of_the_model(call: Call) -> Any:
    """Make the trainer with loaders that add the revision to the calls for models that are given by their names."""
    options = _given(call, "model_init_kwargs")  # SFT up to 0.12 has this argument, which replaces that of the config.
    if options is None:
        # Only what stands in the config is read: no ``__getattr__`` of it is run, which TRL may not run either.
        options = getattr(_given(call, "args"), "__dict__", {}).get("model_init_kwargs") or {}
    revision, of_a_name = options.get("revision"), _which_are_names(call)
    if revision is None or not any(of_a_name):
        return call()
    module, turns = module_of(call.__wrapped__), iter(of_a_name)
    with ExitStack() as stack:
        for loader in _LOADERS:
            if hasattr(module, loader):
                view = _at_revision(getattr(module, loader), revision, turns)
                stack.enter_context(shadowed(module, loader, view))
        return call()


def _given(call: Call, name: str) -> Any:
    """Return an argument of the call, or None if the trainer of this release has no such argument."""
    try:
        return call[name]
    except KeyError:
        # From 0.12 to 0.15 a decorator takes ``tokenizer``, which is no parameter.
        return call.kwargs.get(name)


def _which_are_names(call: Call) -> list[bool]:
    """Return of each tokenizer that the trainer loads, in turn, whether its model is given by its name."""
    from transformers import PreTrainedModel

    is_passed = any(_given(call, name) is not None for name in ("processing_class", "tokenizer"))
    models = [] if is_passed else [_given(call, "model")]
    rewards, tokenizers = (_as_list(_given(call, name)) for name in ("reward_funcs", "reward_processing_classes"))
    tokenizers += [None] * (len(rewards) - len(tokenizers))
    models += [
        reward
        for reward, tokenizer in zip(rewards, tokenizers, strict=False)
        if tokenizer is None and isinstance(reward, (str, PreTrainedModel))
    ]
    return [isinstance(model, str) for model in models]


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list) else [value]


def _at_revision(loader: Any, revision: str, turns: Iterator[bool]) -> Any:
    """Return a view of ``AutoTokenizer`` or ``AutoProcessor`` for the calls in their turns."""

    def from_pretrained(name: Any, *args: Any, **options: Any) -> Any:
        if next(turns, False):
            options["revision"] = revision
        return loader.from_pretrained(name, *args, **options)

    return SimpleNamespace(from_pretrained=from_pretrained)


def tokenizers_are_of_the_revision(module: ModuleType) -> Outcome:
    """Run the constructor until it loads a tokenizer: 1 if it does so at the revision of the model, or 0."""
    from datasets import Dataset

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if (reexported := absent_if_reexported(module, trainer_class.__init__)) is not None:
        return reexported
    if not set(_LOADERS) & set(inspect.unwrap(trainer_class.__init__).__code__.co_names):
        return absent("in this release this trainer loads no tokenizer")
    loads: list[Any] = []

    def load(name: str, **options: Any) -> Any:
        loads.append(options.get("revision"))
        raise StopConstruction

    shadows = {**_stand_ins(), **dict.fromkeys(_LOADERS, SimpleNamespace(from_pretrained=load))}
    # SFT of 0.9.6 fails without a dtype.
    settings: dict[str, Any] = {"model_init_kwargs": {"torch_dtype": "auto", "revision": "v1"}}
    settings |= {"distributed_state": SimpleNamespace(distributed_type="NO"), "gradient_checkpointing": False}
    args = default_arguments(getattr(module, trainer_class.__name__.replace("Trainer", "Config")), **settings)
    needs_rewards = "reward_funcs" in inspect.signature(trainer_class.__init__).parameters
    # To make a real dataset takes longer than all else.
    rows: Any = object.__new__(type("Rows", (Dataset,), {"column_names": []}))
    others = {"train_dataset": rows, **({"reward_funcs": len} if needs_rewards else {})}
    with ExitStack() as stack:
        stack.enter_context(single_process(module))
        for name in shadows.keys() & vars(module).keys():
            stack.enter_context(shadowed(module, name, shadows[name]))
        stack.enter_context(suppress(StopConstruction))
        trainer_class.__init__(object.__new__(trainer_class), "org/model", args=args, **others)
    (revision,) = loads
    return judge(float(revision == "v1"), right=1.0, wrong=0.0, revision=revision)


def _stand_ins() -> dict[str, Any]:
    """Return what loads a model, under each name that a release has for it."""
    import torch
    import transformers

    def load(name: str, *args: Any, **options: Any) -> Any:
        model = torch.nn.Identity()
        model.config = SimpleNamespace(_name_or_path=name, is_encoder_decoder=False)
        return model

    loader, config = SimpleNamespace(from_pretrained=load), SimpleNamespace(architectures=["Model"])
    attributes = {"Model": loader, "__getattr__": lambda self, name: getattr(transformers, name)}
    stand_ins: dict[str, Any] = {"transformers": type("Transformers", (), attributes)(), "create_model_from_path": load}
    stand_ins |= dict.fromkeys(("AutoModelForCausalLM", "AutoModelForSequenceClassification"), loader)
    stand_ins |= {"AutoConfig": SimpleNamespace(from_pretrained=lambda _: config), "is_peft_model": lambda model: False}
    return stand_ins
