"""A micro-batch under DeepSpeed, with the methods of the installed DeepSpeed, which is not imported."""

from __future__ import annotations

import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def deepspeed_method(file: str, name: str) -> Any:
    """Return a method of the installed DeepSpeed by its source, or None.

    To import DeepSpeed takes seconds, and it sets up a device. TRL puts that off: it disturbs vLLM (DeepSpeed issue
    7252).
    """
    import torch

    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        return None
    source = Path(spec.origin).with_name("runtime").joinpath(file).read_text(encoding="utf-8")
    found = re.search(rf"^    def {name}\(.*?(?=^ {{0,4}}\S|\Z)", source, re.DOTALL | re.MULTILINE)
    if found is None:
        return None
    namespace: dict[str, Any] = {"torch": torch}
    exec(compile(textwrap.dedent(found[0]), str(file), "exec"), namespace)
    return namespace[name]


class _StepEndsError(Exception):
    """The micro-batch is over."""


def class_with_steps(module: ModuleType) -> Any:
    """Return the trainer of this module if its ``training_step`` is the first of TRL's in a micro-batch, else None.

    A trainer may have a training loop of its own, and no step. A base in TRL has the step of one that only calls
    ``super().training_step``, or inherits it.
    """
    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    named = [value for name, value in vars(module).items() if name.strip("_").lower() == class_name]
    trainer_class = next((value for value in named if value.__module__ == module.__name__), None)
    if trainer_class is None:
        return None
    loop, step = inspect.unwrap(trainer_class.train), inspect.unwrap(trainer_class.training_step)
    # SFT up to 0.11.4 does something before and after the loop of transformers.
    has_own_loop = loop.__module__.startswith("trl.") and "super" not in loop.__code__.co_names
    is_own = step.__module__ == trainer_class.__module__ and "super" not in step.__code__.co_names
    has_base_in_trl = any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:])
    return None if has_own_loop or (has_base_in_trl and not is_own) else trainer_class


def micro_batch_under_deepspeed(trainer_class: Any, engine: Any, run: Callable[[], None]) -> None:
    """Call ``training_step`` of a trainer whose engine is ``engine``.

    It puts the model in training mode first. Here that is the whole micro-batch: ``run``.
    """

    class Model:
        def train(self) -> None:
            run()
            raise _StepEndsError

    trainer = object.__new__(trainer_class)
    vars(trainer).update(
        accelerator=SimpleNamespace(deepspeed_engine_wrapped=SimpleNamespace(engine=engine)),
        maybe_activation_offload_context=nullcontext(),
        _prepare_context_parallel_inputs=lambda model, inputs: (nullcontext, inputs),
    )
    with suppress(_StepEndsError):
        trainer.training_step(Model(), {})
