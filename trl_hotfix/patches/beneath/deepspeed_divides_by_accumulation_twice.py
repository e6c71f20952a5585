"""DeepSpeed 0.18.3 divides gradients by ``gradient_accumulation_steps``, although transformers has done so.

From 4.49 on transformers divides the loss itself, and calls ``engine.backward(loss, scale_wrt_gas=False)``. The engine
of 0.18.3 divides in a hook on its outputs, ``_backward_prologue_per_tensor``, which ignores that argument. 0.18.4
(DeepSpeed PR 7724) heeds it.

During a micro-batch the engine of this trainer has a hook of its own, which divides only if ``backward`` was called to.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, deepspeed_divides, deepspeed_engine, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_steps, deepspeed_method, micro_batch_under_deepspeed

HOOK = "_backward_prologue_per_tensor"
MICRO_BATCHES = 4


@wrapper
def divide_if_told(call: Call) -> Any:
    """Run the micro-batch with an engine whose hook heeds ``scale_wrt_gas``."""
    engine = deepspeed_engine(call.trainer)
    act = call.act_later()
    if engine is None or engine.gradient_accumulation_steps() == 1:
        return call()
    divide, engine_backward = getattr(engine, HOOK), engine.backward
    divides = True

    def backward(*args: Any, **options: Any) -> Any:
        # accelerate hands this argument on by its name.
        nonlocal divides
        divides = options.get("scale_wrt_gas", True)
        return engine_backward(*args, **options)

    def divide_or_not(gradient: Any) -> Any:
        if divides:
            return divide(gradient)
        act()
        return gradient

    with shadowed(engine, HOOK, divide_or_not), shadowed(engine, "backward", backward):
        return call()


def gradient_is_not_divided_again(module: ModuleType) -> Outcome:
    """Send a gradient of 1 through the hook of DeepSpeed, in a backward that should not divide it."""
    trainer_class, method = class_with_steps(module), deepspeed_method("engine.py", HOOK)
    if trainer_class is None or deepspeed_divides():
        return absent("a base has the step, or the trainer has a loop of its own, or transformers has DeepSpeed divide")
    if method is None or "_scale_wrt_gas" in method.__code__.co_names:
        return absent("DeepSpeed does not divide in this hook, or heeds the argument")

    def backward(loss: float, *, scale_wrt_gas: bool) -> None:
        gradients.append(engine.hook(loss))

    engine: Any = type("Engine", (SimpleNamespace,), {HOOK: method})(backward=backward)
    engine.gradient_accumulation_steps = lambda: MICRO_BATCHES
    gradients: list[float] = []

    def micro_batch() -> None:
        engine.hook = getattr(engine, HOOK)  # The forward hands it to the tensors of its output.
        engine.backward(1.0, scale_wrt_gas=False)

    micro_batch_under_deepspeed(trainer_class, engine, micro_batch)
    return judge(gradients[0], right=1.0, wrong=1 / MICRO_BATCHES)
