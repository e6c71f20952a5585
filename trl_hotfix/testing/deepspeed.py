"""A micro-batch under DeepSpeed, with the methods of the installed DeepSpeed, which is not imported."""

from __future__ import annotations

import importlib.util
import re
import textwrap
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any


def deepspeed_method(file: str, name: str) -> Any:
    """Return a method of the installed DeepSpeed by its source, or None if it has none.

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


def micro_batch_under_deepspeed(module: ModuleType, engine: Any, run: Callable[[], None]) -> None:
    """Call the ``training_step`` of this module's trainer, whose engine is ``engine``.

    Each of them puts the model in training mode first. Here that is the whole micro-batch: ``run``.
    """
    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.strip("_").lower() == class_name)

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
