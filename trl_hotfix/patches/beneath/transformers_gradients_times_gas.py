"""transformers 4.46 and 4.47 never divide the loss by ``gradient_accumulation_steps``.

From 4.46 on ``Trainer`` has the model divide the loss by the items of the whole step, ``num_items_in_batch``. A model
that takes no ``**kwargs``, and a trainer that computes its loss itself, return the mean of a micro-batch instead, and
``Trainer.training_step`` divides only the loss that it returns for the log. 4.46.0 and 4.46.1 multiply away the
division of accelerate, and log the loss times the accumulation as well, as 4.47.1 does where a batch has labels. 4.48
divides the loss before it goes backward (pull request 35438); 4.48.1 settles where.

The step is wrapped and not ``compute_loss``: what a subclass adds to TRL's loss is divided too, and the evaluation,
which calls the same ``compute_loss``, is left alone. Releases from 0.14.0 on set ``model_accepts_loss_kwargs`` to
False, which these releases of transformers do not ask before they go backward.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, micro_batches, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer


@wrapper
def take_the_mean_of_the_micro_batches(call: Call) -> Any:
    """Run the step with a ``compute_loss`` that divides by the micro-batches, and return for the log what it returned.

    The loss is a new tensor for the log: 4.46.0 and 4.46.1 multiply the one that they are given, in place.
    """
    trainer, steps = call.trainer, micro_batches(call.trainer)
    if steps == 1 or _is_divided_by(call["num_items_in_batch"], trainer) or _is_divided_later(trainer):
        return call()
    compute_loss, logged = trainer.compute_loss, []

    def compute_share(*args: Any, **kwargs: Any) -> Any:
        share = compute_loss(*args, **kwargs) / steps
        logged.append(share.detach().mean())
        return share

    with shadowed(trainer, "compute_loss", compute_share):
        result = call()
    # SageMaker's model parallelism calls the model itself, and divides.
    return logged[0] if logged else result


def _is_divided_by(items: Any, trainer: Any) -> bool:
    """Return whether the loss is divided by the items of the step, by the model or by the user's function."""
    return items is not None and bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func)


def _is_divided_later(trainer: Any) -> bool:
    """Return whether DeepSpeed's engine divides the loss, or accelerate because its launcher has told it to."""
    accelerator = trainer.accelerator
    divides = accelerator.distributed_type == "DEEPSPEED" or accelerator.gradient_accumulation_steps != 1
    return divides and not _is_multiplied_before()


def _is_multiplied_before() -> bool:
    """Return whether transformers tells accelerate of the accumulation and multiplies the loss by it: before 4.46.2."""
    from transformers import Trainer

    makes = inspect.unwrap(Trainer.create_accelerator_and_postprocess).__code__
    return "GradientAccumulationPlugin" in makes.co_names


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """Judge the gradient of one of two micro-batches. The derivative of its loss is 1."""
    import torch
    from transformers import Trainer, TrainingArguments

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next((value for name, value in vars(module).items() if name.lower() == class_name), None)
    if trainer_class is None or trainer_class.__module__ != module.__name__:
        return absent("this module has no trainer of its own")
    step = inspect.unwrap(Trainer.training_step).__code__
    if "num_items_in_batch" not in step.co_varnames or "current_gradient_accumulation_steps" in step.co_names:
        return absent("accelerate divides, or transformers by the micro-batches of the step")
    if module_of(trainer_class.training_step) is module:
        return absent("this trainer has a step of its own, which no release for transformers 4.46 and 4.47 has")
    takes_items = "num_items_in_batch" in inspect.signature(trainer_class.compute_loss).parameters
    if "get_batch_samples" in vars(trainer_class) or not takes_items:
        return absent("this trainer is of a release before transformers 4.46, and fails there")
    weight = torch.nn.Parameter(torch.tensor(0.5))
    trainer = stub_trainer(
        trainer_class,
        default_arguments(TrainingArguments, gradient_accumulation_steps=2, n_gpu=0),
        model=torch.nn.Linear(1, 1),
        optimizer=None,
        compute_loss=lambda model, inputs, **kwargs: weight * inputs["number"],
        compute_loss_context_manager=nullcontext,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        use_apex=False,
        state=SimpleNamespace(global_step=0),
        _prepare_inputs=lambda inputs: inputs,
    )
    told = 2 if _is_multiplied_before() else 1
    vars(trainer.accelerator).update(distributed_type="NO", gradient_accumulation_steps=told)
    trainer.accelerator.backward = lambda loss, **kwargs: (loss / told).backward()
    trainer.training_step(trainer.model, {"number": 1.0}, None)
    return judge(float(weight.grad), right=0.5, wrong=1.0)
