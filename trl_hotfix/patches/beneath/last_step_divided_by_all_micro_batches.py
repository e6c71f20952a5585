"""The last step of an epoch has fewer micro-batches, and transformers divides it as if it had all of them.

``Trainer.training_step`` divides a loss that the trainer computes by ``gradient_accumulation_steps``. From 4.55 on it
divides by the micro-batches of the step, which it counts where it fetches them. The wrappers do the same: one counts,
and the other has ``training_step`` read that count.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, micro_batches, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, stub_trainer


@wrapper
def count_the_micro_batches(call: Call) -> Any:
    """Keep the number of micro-batches of a step under the name that later releases of transformers use."""
    fetched, items = call()
    call.trainer.current_gradient_accumulation_steps = len(fetched)
    return fetched, items


@wrapper
def divide_by_the_micro_batches_of_the_step(call: Call) -> Any:
    """Run the step with the number of its own micro-batches."""
    args, steps = call.trainer.args, micro_batches(call.trainer)
    if steps == args.gradient_accumulation_steps:
        return call()
    call.act()
    with shadowed(args, "gradient_accumulation_steps", steps):
        return call()


def short_step_is_a_mean(module: ModuleType) -> Outcome:
    """Run a step of two micro-batches where others have four. The derivative of each loss is 1."""
    import torch
    from transformers import Trainer, TrainingArguments

    trainer_class = class_with_steps(module)
    if trainer_class is None:
        return absent("this module has no trainer with the loop of transformers")
    step = inspect.unwrap(Trainer.training_step).__code__
    if "scale_wrt_gas" not in step.co_consts or "current_gradient_accumulation_steps" in step.co_names:
        return absent("this transformers divides by the micro-batches of the step, or within its loop")
    weight = torch.nn.Parameter(torch.tensor(0.5))
    trainer = stub_trainer(
        trainer_class,
        default_arguments(
            TrainingArguments, gradient_accumulation_steps=4, n_gpu=0, average_tokens_across_devices=False
        ),
        model=torch.nn.Linear(1, 1),
        optimizer=None,
        compute_loss=lambda model, inputs, **kwargs: weight * 1.0,
        compute_loss_context_manager=nullcontext,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        use_apex=False,
        maybe_activation_offload_context=nullcontext(),
        state=SimpleNamespace(global_step=0),
        _prepare_inputs=lambda inputs: inputs,
    )
    backward = lambda loss, **kwargs: loss.backward()  # noqa: E731
    vars(trainer.accelerator).update(distributed_type="NO", backward=backward)
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    fetched, items = trainer.get_batch_samples(iter([{}, {}]), 2, *device)
    for inputs in fetched:
        trainer.training_step(trainer.model, inputs, items)
    return judge(float(weight.grad), right=1.0, wrong=0.5)
