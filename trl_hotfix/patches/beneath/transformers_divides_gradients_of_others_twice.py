"""The bug of ``transformers_divides_gradients_twice``, in trainers that have transformers' own step.

They inherit ``Trainer.training_step``. The wrapper stands on TRL's class, and accelerate knows of one micro-batch while
the inherited method runs. Distillation up to 1.9 has a step of its own, in a module that is gone since.
"""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType, ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer


@wrapper
def have_accelerate_divide_by_one(call: Call) -> Any:
    """Run the step with an accelerator that knows of one micro-batch. DeepSpeed's engine divides by nothing here."""
    accelerator = call.trainer.accelerator
    steps = accelerator.gradient_accumulation_steps
    if steps == 1 or accelerator.distributed_type == "DEEPSPEED":
        return call()
    call.act()
    accelerator.gradient_accumulation_steps = 1
    try:
        return call()
    finally:
        accelerator.gradient_accumulation_steps = steps


class _Told(Exception):
    """transformers makes an accelerator, and tells it a number of micro-batches."""

    @classmethod
    def by_transformers(cls, *, gradient_accumulation_plugin: Any, **settings: Any) -> Any:
        raise cls(gradient_accumulation_plugin.num_steps)


def gradient_is_divided_once(module: ModuleType) -> Outcome:
    """Differentiate the loss of one of two micro-batches by its only weight: a half, and a quarter with the bug."""
    import torch
    import transformers.trainer as beneath

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next((value for name, value in vars(module).items() if name.lower() == class_name), None)
    if trainer_class is None or trainer_class.__module__ != module.__name__:
        return absent("this module has no trainer")
    if module_of(trainer_class.training_step) is module and "distillation" not in class_name:
        return absent("this trainer has a step of its own")
    if not hasattr(beneath.Trainer, "_build_accelerator_args"):
        return absent("this transformers tells accelerate of nothing")
    from transformers.trainer_pt_utils import AcceleratorConfig

    weight = torch.nn.Parameter(torch.tensor(0.5))
    settings = {"accelerator_config": AcceleratorConfig(), "fsdp_plugin_args": None, "n_gpu": 0}
    trainer = stub_trainer(
        trainer_class,
        default_arguments(beneath.TrainingArguments, gradient_accumulation_steps=2, **settings),
        compute_loss=lambda model, inputs, num_items_in_batch=None: weight * 1.0,
        compute_loss_func=None,
        current_gradient_accumulation_steps=2,
        model_accepts_loss_kwargs=False,
        optimizer=None,
        _build_accelerator_args=lambda **settings: settings,
        _prepare_context_parallel_inputs=lambda model, inputs: (nullcontext, inputs),
        _prepare_inputs=lambda inputs: inputs,
        # The step of distillation counts.
        _get_liger_zero3_lm_head_gather_ctx=lambda model: nullcontext(),
        **dict.fromkeys(("_buffered_on_policy_flags", "_buffered_inputs"), None),
        **dict.fromkeys(("_buffer_step", "_off_policy_loss_total", "_off_policy_step_equiv"), 0),
    )
    with shadowed(beneath, "Accelerator", _Told.by_transformers):
        try:
            beneath.Trainer.create_accelerator_and_postprocess(trainer)
        except _Told as told:
            (steps,) = told.args
    if steps == 1:
        return absent("this transformers tells accelerate of one micro-batch")
    vars(trainer.accelerator).update(distributed_type="NO", scaler=None, gradient_accumulation_steps=steps)
    trainer.accelerator.backward = MethodType(beneath.Accelerator.backward, trainer.accelerator)
    trainer.training_step(torch.nn.Linear(1, 1), {})
    return judge(float(weight.grad or 0), right=0.5, wrong=0.25)
