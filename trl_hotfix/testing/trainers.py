"""Trainers of any family: never initialised, constructed without transformers' part, or stopped half-way."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import MISSING, fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, shadowed
from ..model import Outcome
from .tokenizers import tiny_tokenizer

ONE_PROCESS: Mapping[str, Any] = {"device": "cpu", "num_processes": 1, "is_main_process": True}
"""The attributes of an accelerator in a run of one process."""


def default_arguments(config_class: type, **changed: Any) -> SimpleNamespace:
    """Return the defaults of a TRL config class.

    Its ``__post_init__`` is not run, since that would set up devices and processes.
    """
    defaults: dict[str, Any] = {}
    for field in fields(config_class):
        if field.default is not MISSING:
            defaults[field.name] = field.default
        elif field.default_factory is not MISSING:
            defaults[field.name] = field.default_factory()
    return SimpleNamespace(**{**defaults, **changed})


def trainer_and_config(module: ModuleType, *methods: str) -> tuple[Any, Any]:
    """Return the trainer's class and its config's, of the first of these methods (``GRPO``, ``RLOO``) in ``module``.

    Raises ``LookupError`` if there is no such class.
    """
    for method in methods:
        if hasattr(module, f"{method}Trainer"):
            return getattr(module, f"{method}Trainer"), getattr(module, f"{method}Config", None)
    raise LookupError(f"{module.__name__} has a trainer of none of these methods: {', '.join(methods)}")


def as_tokenizer_of(trainer_class: Any, tokenizer: Any) -> dict[str, Any]:
    """Return ``tokenizer`` as the argument of a trainer: ``processing_class`` since TRL 0.12, ``tokenizer`` before."""
    parameters = inspect.signature(trainer_class.__init__).parameters
    return {"processing_class" if "processing_class" in parameters else "tokenizer": tokenizer}


def stub_trainer(trainer_class: type, args: SimpleNamespace, **attributes: Any) -> Any:
    """Return a trainer that was never initialised.

    Its methods are the installed ones; an attribute that is not set comes from ``args``.
    """

    def from_args(self: Any, name: str) -> Any:
        try:
            return vars(args)[name]
        except KeyError:
            raise AttributeError(name) from None

    stub_class = type(trainer_class.__name__, (trainer_class,), {"__getattr__": from_args})
    trainer: Any = object.__new__(stub_class)
    identities = ("unwrap_model", "gather", "gather_for_metrics", "reduce", "pad_across_processes")
    accelerator = SimpleNamespace(**ONE_PROCESS, **dict.fromkeys(identities, lambda value, *args, **kwargs: value))
    vars(trainer).update({"args": args, "accelerator": accelerator, **attributes})
    return trainer


def constructed(trainer_class: type, **arguments: Any) -> Any:
    """Return a trainer whose own constructor has run on ``arguments``, without transformers' constructor beneath it."""
    import torch
    from transformers import Trainer
    from transformers.trainer_callback import CallbackHandler, DefaultFlowCallback

    class Parent(Trainer):  # type: ignore[misc]
        """Comes before transformers' own class in the method resolution order."""

        is_deepspeed_enabled = is_fsdp_enabled = False

        def __init__(self, **arguments: Any) -> None:
            self.__dict__.update(arguments)
            callbacks = [DefaultFlowCallback, *(arguments.get("callbacks") or [])]
            self.callback_handler = CallbackHandler(callbacks, arguments.get("model"), None, None, None)
            self.accelerator = SimpleNamespace(
                prepare_model=lambda model, **kwargs: model,
                parallelism_config=None,
                **{**ONE_PROCESS, "device": torch.device("cpu")},
            )

    trainer: Any = object.__new__(type(trainer_class.__name__, (trainer_class, Parent), {}))
    trainer_class.__init__(trainer, **arguments)  # type: ignore[misc]
    return trainer


def quick_is_peft_model(module: ModuleType) -> AbstractContextManager[None]:
    """Have the ``is_peft_model`` of a module, if it has one, look at the class alone inside the block.

    That of accelerate reads the metadata of the installed PEFT at each call, which takes a millisecond.
    """

    def is_peft_model(model: Any) -> bool:
        peft: Any = sys.modules.get("peft")
        return peft is not None and isinstance(model, peft.PeftModel)

    return shadowed(module, "is_peft_model", is_peft_model) if hasattr(module, "is_peft_model") else nullcontext()


class StopConstruction(Exception):
    """The constructor has gone as far as the self-test needs."""


def begin_trainer(
    module: ModuleType,
    trainer_class: Any,
    model: Any,
    *,
    parent: Callable[[Any], None] = lambda trainer: None,
    shadows: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Any:
    """Run the real ``__init__`` of a DPO, KTO, GRPO or RLOO trainer until something raises ``StopConstruction``.

    Its superclass only takes model and arguments, and calls ``parent`` with the trainer. ``shadows`` replace names of
    the module meanwhile, those that it has; ``settings`` are arguments. The trainer is returned as it is then.
    """

    class Parent(*trainer_class.__bases__):  # type: ignore[misc]
        def __init__(self, *, model: Any, args: Any, **unused: Any) -> None:
            self.model, self.args = model, args
            self.accelerator = SimpleNamespace(parallelism_config=None, **ONE_PROCESS)
            self.is_deepspeed_enabled = self.is_fsdp_enabled = False
            parent(self)

    class Stub(trainer_class, Parent):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
            return dataset

    with_rewards = "reward_funcs" in inspect.signature(trainer_class.__init__).parameters
    one_device = {"n_gpu": 0, "distributed_state": SimpleNamespace(distributed_type="NO"), "eval_strategy": "no"}
    one_device |= {"deepspeed_plugin": None, "bf16": False, "beta": 0.5}
    step = {"steps_per_generation": 1, "generation_batch_size": 8, "loss_type": "grpo"} if with_rewards else {}
    config_class = getattr(module, trainer_class.__name__.replace("Trainer", "Config"))
    trainer: Any = object.__new__(Stub)
    with ExitStack() as stack:
        # A self-test must not set the seed of the process.
        for name, substitute in {"set_seed": lambda *args, **kwargs: None, **(shadows or {})}.items():
            if hasattr(module, name):
                stack.enter_context(shadowed(module, name, substitute))
        stack.enter_context(quick_is_peft_model(module))
        stack.enter_context(suppress(StopConstruction))
        Stub.__init__(
            trainer,
            model=model,
            args=default_arguments(config_class, **{**one_device, **step, **settings}),
            **({"reward_funcs": len} if with_rewards else {}),
            train_dataset=_one_row(),
            processing_class=tiny_tokenizer(),
        )
    return trainer


@functools.cache
def _one_row() -> Any:
    """Return a dataset. It is made once, since that takes as long as all else that the constructor does."""
    from datasets import Dataset

    return Dataset.from_dict({"prompt": ["a"], "completion": ["b"], "label": [True]})


def absent_if_reexported(module: ModuleType, method: Any) -> Outcome | None:
    """Return ``absent`` if ``module`` only re-exports this method, since a class that has moved keeps its old name."""
    # A method that another patch is on has a module of ours.
    home = inspect.unwrap(method).__module__
    return None if home == module.__name__ else absent(f"{module.__name__} hands the method on from {home}")
