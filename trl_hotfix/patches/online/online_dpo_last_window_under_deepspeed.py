"""Under DeepSpeed, Online DPO, XPO and Nash-MD divide a step of few micro-batches as if it were a full one.

Each of the three has a ``training_step`` of its own, which passes the undivided loss to ``accelerator.backward`` and
has the engine divide it. The engine knows one divisor, that of its config. From 4.55 on transformers counts the
micro-batches of each step: its own ``training_step`` divides by that count, and passes ``scale_wrt_gas=False``.
accelerate 1.8 and later ends the step at the last micro-batch of an epoch. Earlier ones leave that to the engine, which
carries the rest over into the next epoch; its divisor is right then.

The wrapper passes a loss that is larger by what the engine divides too much. ``scale_wrt_gas=False`` would do the same
but for DeepSpeed 0.18.3, which does not heed it (``deepspeed-divides-by-accumulation-twice``).
"""

from __future__ import annotations

from inspect import signature, unwrap
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, deepspeed_engine, judge, micro_batches, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, online_dpo_stub


@wrapper
def divide_by_the_micro_batches_of_the_step(call: Call) -> Any:
    """Run the step with an ``accelerator.backward`` that makes up for the divisor of the engine."""
    accelerator, engine, steps = call.trainer.accelerator, deepspeed_engine(call.trainer), micro_batches(call.trainer)
    if engine is None or engine.gradient_accumulation_steps() == steps:
        return call()
    backward, divisor = accelerator.backward, engine.gradient_accumulation_steps()

    def backward_of_share(loss: Any, **options: Any) -> Any:
        return backward(loss * (divisor / steps), **options)

    with shadowed(accelerator, "backward", backward_of_share):
        return call()


def short_step_is_a_mean(module: ModuleType) -> Outcome:
    """Have an engine divide by 4 in a step of two micro-batches, and compare with half of the loss."""
    from accelerate.utils.deepspeed import DeepSpeedEngineWrapper  # type: ignore[import-untyped]
    from transformers import Trainer

    class_names = {"xpo_trainer": "XPOTrainer", "nash_md_trainer": "NashMDTrainer"}
    trainer_class = getattr(module, class_names.get(module.__name__.rpartition(".")[2], "OnlineDPOTrainer"))
    if reexported := absent_if_reexported(module, trainer_class.training_step):
        return reexported
    if "current_gradient_accumulation_steps" not in unwrap(Trainer.training_step).__code__.co_names:
        return absent("this transformers divides by gradient_accumulation_steps in every step")
    if "sync_gradients" not in signature(DeepSpeedEngineWrapper.backward).parameters:
        return absent("accelerate leaves it to DeepSpeed when a step ends, and no step is short")
    trainer = online_dpo_stub(module, gradient_accumulation_steps=4)
    trainer.current_gradient_accumulation_steps = 2
    divided: list[float] = []

    def backward(loss: Any, scale_wrt_gas: bool = True) -> None:
        divided.append(float(loss.detach()) / (4 if scale_wrt_gas else 1))

    engine = SimpleNamespace(gradient_accumulation_steps=lambda: 4)
    deepspeed = {"distributed_type": "DEEPSPEED", "deepspeed_engine_wrapped": SimpleNamespace(engine=engine)}
    vars(trainer.accelerator).update(deepspeed, backward=backward)
    logged = float(trainer.training_step(trainer.model, {"prompt": ["a"]}, None))
    return judge(divided[0], right=4 * logged / 2, wrong=logged)
