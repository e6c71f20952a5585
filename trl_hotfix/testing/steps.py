"""A micro-batch whose loss transformers divides, and accelerate, if transformers gives it a number to divide by."""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType
from typing import Any

from ..authoring import shadowed
from .trainers import default_arguments, stub_trainer


class _Given(Exception):
    """transformers makes an accelerator, and gives it a number of micro-batches."""

    @classmethod
    def by_transformers(cls, *, gradient_accumulation_plugin: Any, **settings: Any) -> Any:
        raise cls(gradient_accumulation_plugin.num_steps)


def gradient_of_one_of_two(trainer_class: type, **attributes: Any) -> float | None:
    """Return the gradient of one of two micro-batches of a step, by the weight that is its loss.

    It is None if transformers gives accelerate no number of micro-batches, or one.
    """
    import torch
    import transformers.trainer as beneath

    if not hasattr(beneath.Trainer, "_build_accelerator_args"):
        return None
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
        **attributes,
    )
    with shadowed(beneath, "Accelerator", _Given.by_transformers):
        try:
            beneath.Trainer.create_accelerator_and_postprocess(trainer)
        except _Given as given:
            (steps,) = given.args
    if steps == 1:
        return None
    vars(trainer.accelerator).update(distributed_type="NO", scaler=None, gradient_accumulation_steps=steps)
    trainer.accelerator.backward = MethodType(beneath.Accelerator.backward, trainer.accelerator)
    trainer.training_step(torch.nn.Linear(1, 1), {}, None)
    return float(weight.grad or 0)
