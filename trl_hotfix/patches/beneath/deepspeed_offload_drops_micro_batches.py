"""ZeRO-2 with an offloaded optimizer drops the gradients of all micro-batches but the first and the last.

``async_accumulate_grad_in_cpu_via_gpu`` of DeepSpeed's optimizer adds the sum in CPU memory to the gradients of a
micro-batch. From 0.15.2 (DeepSpeed PR 6550) to 0.18.9 only the first micro-batch of a step is copied to the CPU, and
the new sum is not. 0.19.0 (DeepSpeed PR 7967) copies after each.

During a micro-batch the optimizer of this trainer's engine has a method of its own, which copies the sum: DeepSpeed's
code does that itself where this is the first micro-batch. The last one goes on to the optimizer step. ZeRO-1 has no
other: a copy there would be added to the next step.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, deepspeed_engine, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_steps, deepspeed_method, micro_batch_under_deepspeed

METHOD = "async_accumulate_grad_in_cpu_via_gpu"


@wrapper
def keep_the_sum(call: Call) -> Any:
    """Run the micro-batch with an optimizer that copies the sum of the gradients to the CPU, the last time excepted."""
    optimizer: Any = getattr(deepspeed_engine(call.trainer), "optimizer", None)
    act = call.act_later()
    if not hasattr(optimizer, METHOD) or not optimizer.cpu_offload:
        return call()
    accumulate = getattr(optimizer, METHOD)

    def accumulate_and_copy(parameter: Any) -> None:
        accumulate(parameter)
        number = optimizer.micro_step_id
        if number > 0 and not optimizer.is_gradient_accumulation_boundary:
            optimizer.micro_step_id = 0
            try:
                accumulate(parameter)
            finally:
                optimizer.micro_step_id = number
            act()

    with shadowed(optimizer, METHOD, accumulate_and_copy):
        return call()


def all_micro_batches_are_in_the_gradient(module: ModuleType) -> Outcome:
    """Add up the gradients of a step of four micro-batches, 1, 10, 100 and 1000, with the method of DeepSpeed."""
    import torch

    trainer_class, method = class_with_steps(module), deepspeed_method("zero/stage_1_and_2.py", METHOD)
    if trainer_class is None or method is None:
        return absent("there is no DeepSpeed, or no step: a base has it, or the trainer has a loop of its own")
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer: Any = type("Optimizer", (SimpleNamespace,), {METHOD: method})(
        cpu_offload=True,
        cpu_offload_pin_memory=False,
        fp16_master_weights_and_gradients=False,
        low_precision_master_weights_and_grads=False,
        _offload_gradient_safety_enabled=False,
        _record_offload_copy=lambda: None,
        device="cpu",
        accumulated_grads_in_cpu={},
        temp_grad_buffer_for_gpu_offload=torch.zeros(1),
        grad_position={0: [0, 0, 0, 1]},
        get_param_id=lambda parameter: 0,
        get_param_gradient_attribute=lambda parameter: parameter.grad,
    )
    engine = SimpleNamespace(optimizer=optimizer)
    for number in range(4):
        optimizer.micro_step_id, optimizer.is_gradient_accumulation_boundary = number, number == 3
        weight.grad = torch.tensor([10.0**number])
        micro_batch_under_deepspeed(trainer_class, engine, lambda: getattr(optimizer, METHOD)(weight))
    assert weight.grad is not None
    return judge(float(weight.grad), right=1111.0, wrong=1001.0)
