"""transformers 5.2 to 5.5.3 divide the gradients of a trainer by ``gradient_accumulation_steps`` twice.

``Trainer.training_step`` divides the loss of a micro-batch by the micro-batches of the step, or has it divided by the
tokens of the step. transformers 5.2 begins to give accelerate the number of micro-batches too, as ``num_steps`` of a
``GradientAccumulationPlugin``, and ``Accelerator.backward`` divides by it once more. transformers 5.5.4 gives it 1.

The wrapper gives accelerate 1 for the time of ``training_step``. Online DPO, XPO and Nash-MD have a step of their own,
which does not divide: what accelerate divides there stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, judge, module_of, shadowed
from ...model import Outcome, Verdict
from ...testing import default_arguments, stub_trainer


def have_accelerate_divide_by_one(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the step with an accelerator that knows of one micro-batch. DeepSpeed's engine divides by nothing here."""
    accelerator = instance.accelerator
    steps = accelerator.gradient_accumulation_steps
    if steps == 1 or accelerator.distributed_type == "DEEPSPEED":
        return wrapped(*args, **kwargs)
    act()
    accelerator.gradient_accumulation_steps = 1
    try:
        return wrapped(*args, **kwargs)
    finally:
        accelerator.gradient_accumulation_steps = steps


def gradient_is_divided_once(module: ModuleType) -> Outcome:
    """Judge the gradients of three micro-batches of two steps, divided by their number or by their tokens.

    A step of one micro-batch and one under DeepSpeed have the gradient that they had, and accelerate knows afterwards
    what it knew before.
    """
    from transformers import Trainer

    class_name = module.__name__.rpartition(".")[2].replace("_", "")
    trainer_class = next(value for name, value in vars(module).items() if name.lower() == class_name)
    if module_of(trainer_class.training_step) is not module:
        return absent("this module has no trainer with a step of its own")
    if not hasattr(Trainer, "_build_accelerator_args") or _trainer(trainer_class, steps=2).told == 1:
        return absent("this transformers tells accelerate of one micro-batch")
    outcomes = []
    for by_tokens in (False, True):
        trainer = _trainer(trainer_class, steps=2, by_tokens=by_tokens)
        # The last step of an epoch has one micro-batch.
        for number, in_step in ((1, 2), (2, 2), (3, 1)):
            right = number / (4 if by_tokens else in_step)
            outcomes.append(judge(_gradient(trainer, number, in_step), right=right, wrong=right / 2))
        if trainer.accelerator.gradient_accumulation_steps != 2:
            raise AssertionError("accelerate knows of another number of micro-batches afterwards")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"some micro-batches are divided twice, and others are not: {outcomes}")
    if _gradient(_trainer(trainer_class, steps=1), 1, 1) != 1:
        raise AssertionError("a step of one micro-batch is divided")
    under_deepspeed = _trainer(trainer_class, steps=2, distributed_type="DEEPSPEED")
    if _gradient(under_deepspeed, 1, 2) != 0.5 or under_deepspeed.known_to_the_engine != 2:
        raise AssertionError("DeepSpeed's engine is given another loss, or knows of another number of micro-batches")
    if outcomes[0].verdict is Verdict.FIXED:
        _check_a_step_that_fails(trainer)
    return outcomes[0]


def _check_a_step_that_fails(trainer: Any) -> None:
    def compute_loss(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("a step fails")

    trainer.compute_loss = compute_loss
    try:
        _gradient(trainer, 1, 2)
    except ValueError:
        if trainer.accelerator.gradient_accumulation_steps != 2:
            raise AssertionError("a step that fails leaves accelerate another number of micro-batches") from None


def _trainer(trainer_class: type, *, steps: int, by_tokens: bool = False, distributed_type: str = "NO") -> Any:
    """Return a trainer whose accelerator transformers has made, and accelerate has not set up.

    The loss is a weight times the number that is the batch. ``by_tokens`` it is divided by the tokens of the step, 4.
    """
    import torch
    import transformers.trainer
    from accelerate import Accelerator  # type: ignore[import-untyped]
    from accelerate.state import GradientState  # type: ignore[import-untyped]
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_pt_utils import AcceleratorConfig

    weight = torch.nn.Parameter(torch.tensor(0.5))

    def accelerator_of(*, gradient_accumulation_plugin: Any, **settings: Any) -> Any:
        accelerator: Any = object.__new__(Accelerator)
        gradient_state: Any = object.__new__(GradientState)
        vars(gradient_state).update(plugin_kwargs=gradient_accumulation_plugin.to_kwargs(), sync_gradients=True)
        state = SimpleNamespace(distributed_type=distributed_type, deepspeed_plugin=None, fsdp_plugin=None)
        vars(accelerator).update(state=state, gradient_state=gradient_state, scaler=None)
        vars(accelerator).update(deepspeed_engine_wrapped=SimpleNamespace(backward=engine_backward))
        return accelerator

    def engine_backward(loss: Any, **options: Any) -> None:
        trainer.known_to_the_engine = trainer.accelerator.gradient_accumulation_steps
        loss.backward()

    def compute_loss(model: Any, inputs: Any, num_items_in_batch: Any = None, **options: Any) -> Any:
        return weight * inputs["number"] / (num_items_in_batch or 1)

    args = default_arguments(
        TrainingArguments,
        gradient_accumulation_steps=steps,
        accelerator_config=AcceleratorConfig(),
        fsdp_plugin_args=None,
        mixed_precision="no",
        device=torch.device("cpu"),
        n_gpu=0,
    )
    trainer = stub_trainer(
        trainer_class,
        args,
        model=torch.nn.Linear(1, 1),
        weight=weight,
        optimizer=None,
        compute_loss=compute_loss,
        compute_loss_func=None,
        model_accepts_loss_kwargs=by_tokens,
        _build_accelerator_args=lambda **settings: settings,
        _prepare_inputs=lambda inputs: inputs,
        maybe_activation_offload_context=nullcontext(),
        state=SimpleNamespace(global_step=0),
        num_iterations=1,
        _step=0,
        _current_train_step_time=0.0,
        _metrics={"train": defaultdict(list)},
        tokens=4 if by_tokens else None,
    )
    with shadowed(transformers.trainer, "Accelerator", accelerator_of):
        Trainer.create_accelerator_and_postprocess(trainer)
    trainer.told = trainer.accelerator.gradient_accumulation_steps
    return trainer


def _gradient(trainer: Any, number: int, in_step: int) -> float:
    """Return the gradient of one micro-batch, in a step of ``in_step``."""
    trainer.current_gradient_accumulation_steps = in_step
    trainer.weight.grad = None
    trainer.training_step(trainer.model, {"number": float(number)}, trainer.tokens)
    return float(trainer.weight.grad)
