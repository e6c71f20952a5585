"""With label smoothing SFT accumulates means over micro-batches as if they were divided by the tokens of the step.

``LabelSmoother`` of transformers divides by the tokens of the micro-batch. ``Trainer.compute_loss``, which SFT calls up
to 1.14.2, and SFT's own ``compute_loss`` from 1.15.0 on are given ``num_items_in_batch``. So ``Trainer`` does not
divide the loss by the micro-batches of the step, and multiplies it by the ranks, as belongs to that count. From
transformers 5.15.0 on ``LabelSmoother`` takes the count, and TRL 1.15.0 passes it there.

The wrapper gives the trainer a label smoother that has the weight of its tokens among those of the step.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, stub_trainer


@wrapper
def weigh_by_tokens(call: Call) -> Any:
    """Divide the sum over the tokens of the micro-batch by the count of the step."""
    items, trainer = call["num_items_in_batch"], call.trainer
    smoother = trainer.label_smoother
    if (
        items is None
        or smoother is None
        or not trainer.model_accepts_loss_kwargs  # Trainer divides by the micro-batches.
        or trainer.compute_loss_func is not None
        or getattr(trainer.args, "loss_type", "nll") != "nll"
        or trainer.args.n_gpu > 1
    ):
        return call()

    def smoothed(outputs: Any, labels: Any, shift_labels: bool = False) -> Any:
        tokens = (labels[..., 1:] if shift_labels else labels).ne(smoother.ignore_index).sum()
        if not tokens:  # Its mean is 0 / 0.
            return outputs["logits"].sum() * 0.0
        return smoother(outputs, labels, shift_labels=shift_labels) * tokens / items

    with shadowed(trainer, "label_smoother", smoothed):
        return call()


def smoothed_loss_is_divided_by_the_count(module: ModuleType) -> Outcome:
    """Differentiate the loss of a micro-batch, three of the nine tokens of its step, by the logit of a label.

    All logits are 0, so each of five classes has the probability 0.2. Of the cross-entropy of the token the derivative
    is ``0.2 - 1``. Smoothing takes ``1 - epsilon`` of it, and adds a term for all classes, whose derivative is 0 here.
    """
    import torch
    from transformers import Trainer
    from transformers.trainer_pt_utils import LabelSmoother

    if "num_items_in_batch" not in inspect.signature(Trainer.compute_loss).parameters:
        return absent("this transformers divides by the micro-batches")
    if "num_items_in_batch" in inspect.signature(LabelSmoother.__call__).parameters:
        return absent("this transformers divides the smoothed loss by the count")
    if "compute_loss" not in vars(module.SFTTrainer):
        return absent("SFT has no loss of its own")
    logits, epsilon = torch.zeros(1, 4, 5, requires_grad=True), 0.25

    class Parts(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__  # of outputs; the others are of metrics, with or without a mode
        append = staticmethod(id)

        def __missing__(self, name: str) -> Any:
            return Parts()

    class LlamaForCausalLM(torch.nn.Module):  # type: ignore[misc]
        # By its name transformers knows that labels are shifted. From 1.15.0 on TRL's metrics are of its own head.
        def forward(self, **inputs: Any) -> Any:
            return Parts(logits=logits, **dict.fromkeys(("label_mask", "entropy", "is_top1"), logits[:, 1:, 0]))

    model, tokens = LlamaForCausalLM(), torch.arange(4)[None]
    trainer = stub_trainer(
        module.SFTTrainer,
        default_arguments(module.SFTConfig, n_gpu=1, average_tokens_across_devices=False, loss_type="nll"),
        model=model,
        label_smoother=LabelSmoother(epsilon=epsilon),
        compute_loss_func=None,
        model_accepts_loss_kwargs=True,
        aux_loss_enabled=False,
        num_virtual_tokens=0,
        control=SimpleNamespace(should_evaluate=False),
        _metrics=Parts(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.accelerator.parallelism_config = None
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": tokens}
    (gradient,) = torch.autograd.grad(trainer.compute_loss(model, inputs, num_items_in_batch=9), logits)
    of_a_token = (1 - epsilon) * (1 / 5 - 1)
    return judge(float(gradient[0, 0, 1]), right=of_a_token / 9, wrong=of_a_token / 3)
