"""DPO, KTO, CPO, BCO and ORPO leave the division by ``gradient_accumulation_steps`` to nobody.

``Trainer.training_step`` of transformers 4.48.1 to 4.52 divides the loss by ``gradient_accumulation_steps`` only if
``model_accepts_loss_kwargs`` is False, after ``compute_loss`` has returned. ``Trainer`` sets it to True for a model
whose forward takes ``**kwargs``, as it is to divide by the number of tokens itself. These trainers call such a model
for its logits, and take a mean of their own. TRL sets it to False in the constructors: 0.14.0 in most of them (pull
requests 2615, 2638, 2645, 2648), 0.20.0 in that of ORPO (3716). The wrapper does when the loss is computed.

Before transformers 4.49 (pull request 35808) the engine of DeepSpeed divides as well, and the run is right as it is.
"""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, nobody_divides, wrapper
from ...model import Outcome, Verdict
from ...testing import dpo_stub


@wrapper
def have_the_loss_divided(call: Call) -> Any:
    """Tell transformers, which asks after this call, that this loss is not divided by the number of micro-batches."""
    if nobody_divides(call.trainer):
        call.act()
        call.trainer.model_accepts_loss_kwargs = False
    return call()


def gradient_is_the_mean_of_the_micro_batches(module: ModuleType) -> Outcome:
    """Judge the gradient of one of two micro-batches, as transformers divides it. The derivative of its loss is 1."""
    import torch
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
    weight = torch.nn.Parameter(torch.tensor(0.5))
    trainer = dpo_stub(
        module,
        method,
        model=torch.nn.Linear(1, 1),
        optimizer=None,
        compute_loss_func=None,
        use_apex=False,
        current_gradient_accumulation_steps=2,
        is_deepspeed_enabled=False,
        model_accepts_loss_kwargs=True,
        compute_loss_context_manager=nullcontext,
        _prepare_inputs=lambda inputs: inputs,
        get_batch_loss_metrics=lambda model, inputs, **kwargs: (weight.square(), {}),
        store_metrics=lambda *args, **kwargs: None,
        state=SimpleNamespace(global_step=0),
        deepspeed=None,
    )
    vars(trainer.args).update(gradient_accumulation_steps=2, n_gpu=0, device=torch.device("cpu"))
    trainer.accelerator.distributed_type = "NO"
    trainer.accelerator.backward = lambda loss, **kwargs: loss.backward()
    Trainer.training_step(trainer, trainer.model, {}, None)
    outcome = judge(float(weight.grad), right=0.5, wrong=1.0)
    if outcome.verdict is Verdict.FIXED and trainer.model_accepts_loss_kwargs:
        return absent("this transformers divides by itself")
    return outcome
