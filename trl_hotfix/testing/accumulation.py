"""The micro-batches of a step of DPO, CPO, ORPO, KTO or BCO, as transformers divides their losses."""

from __future__ import annotations

import inspect
import itertools
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge, shadowed, training
from ..model import Outcome, Verdict
from .dpo import dpo_stub


def judge_accumulation(module: ModuleType) -> Outcome:
    """Let transformers run two steps of two micro-batches, and judge their gradients.

    Without accumulation transformers is told nothing, nor under a DeepSpeed that divides itself.
    """
    import transformers
    from packaging.version import Version
    from transformers import Trainer

    method = module.__name__.rpartition(".")[2].removesuffix("_trainer").upper()
    trainer_class = getattr(module, f"{method}Trainer")
    if trainer_class.__module__ != module.__name__ or "compute_loss" not in vars(trainer_class):
        return absent("this module has no trainer that computes a loss of its own")
    says_so = "model_accepts_loss_kwargs" in inspect.unwrap(trainer_class.__init__).__code__.co_names
    if says_so or not hasattr(trainer_class, "get_batch_loss_metrics"):
        return absent("the constructor says that the loss is divided by nothing, or it is computed otherwise")
    if "model_accepts_loss_kwargs" not in inspect.unwrap(Trainer.training_step).__code__.co_names:
        return absent("this transformers does not ask model_accepts_loss_kwargs")
    trainers = [_trainer(module, method, steps=2) for _ in range(3)]
    outcomes = [_outcome(trainer, number) for number, trainer in enumerate(trainers, start=1)]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"some micro-batches are divided, and others are not: {outcomes}")
    is_fixed = outcomes[0].verdict is Verdict.FIXED
    if is_fixed and trainers[0].model_accepts_loss_kwargs:
        return absent("this transformers divides without being told")
    for steps, deepspeed, deepspeed_divides in itertools.product((1, 2), (False, True), (False, True)):
        trainer = _trainer(module, method, steps=steps, deepspeed=deepspeed)
        with shadowed(training, "deepspeed_divides", lambda divides=deepspeed_divides: divides):
            Trainer.training_step(trainer, trainer.model, {"number": 1.0}, None)
        is_told = not trainer.model_accepts_loss_kwargs
        if is_told is not (is_fixed and steps > 1 and not (deepspeed and deepspeed_divides)):
            case = f"{steps} micro-batches, DeepSpeed {deepspeed}, which divides {deepspeed_divides}"
            raise AssertionError(f"{case}: transformers is told to divide: {is_told}")
    if training.deepspeed_divides() is not (Version(transformers.__version__) < Version("4.49")):
        raise AssertionError(f"whether DeepSpeed divides is wrong for transformers {transformers.__version__}")
    # The stand-ins of other self-tests ask nobody.
    del trainer.model_accepts_loss_kwargs
    trainer.compute_loss(trainer.model, {"number": 1.0})
    if hasattr(trainer, "model_accepts_loss_kwargs"):
        raise AssertionError("a trainer without model_accepts_loss_kwargs has it")
    return outcomes[0]


def _trainer(module: ModuleType, method: str, *, steps: int, deepspeed: bool = False) -> Any:
    """Return a trainer of a model whose forward takes ``**kwargs``, as its constructor leaves it.

    Its loss is the square of a weight times a number that is the batch.
    """
    import torch

    weight = torch.nn.Parameter(torch.tensor(0.5))
    trainer = dpo_stub(
        module,
        method,
        model=torch.nn.Linear(1, 1),
        weight=weight,
        optimizer=None,
        compute_loss_func=None,
        use_apex=False,
        current_gradient_accumulation_steps=steps,
        is_deepspeed_enabled=deepspeed,
        model_accepts_loss_kwargs=True,
        compute_loss_context_manager=nullcontext,
        _prepare_inputs=lambda inputs: inputs,
        get_batch_loss_metrics=lambda model, inputs, **kwargs: (weight.square() * inputs["number"], {}),
        store_metrics=lambda *args, **kwargs: None,
        state=SimpleNamespace(global_step=0),
        deepspeed=None,
    )
    vars(trainer.args).update(gradient_accumulation_steps=steps, n_gpu=0, device=torch.device("cpu"))
    trainer.accelerator.distributed_type = "DEEPSPEED" if deepspeed else "NO"
    trainer.accelerator.backward = lambda loss, **kwargs: loss.backward()
    return trainer


def _outcome(trainer: Any, number: int) -> Outcome:
    """Judge the gradient of one micro-batch. The derivative of its loss is ``number``."""
    from transformers import Trainer

    trainer.state.global_step = number // 2
    trainer.weight.grad = None
    Trainer.training_step(trainer, trainer.model, {"number": float(number)}, None)
    return judge(float(trainer.weight.grad), right=number / 2, wrong=float(number))
