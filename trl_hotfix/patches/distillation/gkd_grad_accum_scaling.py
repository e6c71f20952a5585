"""GKD returns the mean of a micro-batch, and nobody divides it by the micro-batches of the step.

``Trainer`` counts the labels of all micro-batches of a step, hands the count over as ``num_items_in_batch``, and takes
it that a loss which is given this count is divided by it (``model_accepts_loss_kwargs``). ``GKDTrainer.compute_loss``
takes the count and leaves it alone. The wrapper multiplies the mean by its tokens over the tokens of the step, as TRL
1.7.0 does (pull request 6006). The count is of the dataset's labels. Generated labels replace them later, so there
each micro-batch has the same weight.

With transformers 4.46 and 4.47 the same is missing, but they report the loss of any trainer divided once more.
"""

from __future__ import annotations

from inspect import signature, unwrap
from types import ModuleType
from typing import Any

from ...authoring import (
    Call,
    GeneratedLabels,
    absent,
    copies_of_a_loss_of_all_gpus,
    judge,
    micro_batches,
    nobody_divides,
    wrapper,
)
from ...model import Outcome
from ...testing import absent_if_reexported, distillation_stub

_generated = GeneratedLabels()


@wrapper
def note_what_is_generated(call: Call) -> Any:
    """Keep the labels for ``compute_loss``."""
    generated = call()
    _, _, labels = generated
    _generated.note(labels)
    return generated


@wrapper
def weigh_by_tokens(call: Call) -> Any:
    """Return the loss of a micro-batch times its share of the step."""
    result, items = call(), call["num_items_in_batch"]
    if items is None or not call["model"].training or not nobody_divides(call.trainer):
        return result
    share = _share(call.trainer, call["inputs"]["labels"], items)
    return (result[0] * share, *result[1:]) if isinstance(result, tuple) else result * share


def _share(trainer: Any, labels: Any, items: Any) -> Any:
    if _generated.are(labels):
        return 1 / micro_batches(trainer)
    return (labels != -100).sum() * copies_of_a_loss_of_all_gpus(trainer) / items


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Differentiate the mean of a logit over two labels of a step that has five."""
    import torch
    from transformers import Trainer

    if reexported := absent_if_reexported(module, module.GKDTrainer.compute_loss):
        return reexported
    if "num_items_in_batch" in signature(module.GKDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is divided by the tokens of the step")
    if "model_accepts_loss_kwargs" not in unwrap(Trainer.training_step).__code__.co_names:
        return absent("this transformers does not ask model_accepts_loss_kwargs")

    def mean_of_logits(student_logits: Any, labels: Any, **others: Any) -> Any:
        return student_logits[labels != -100][:, 0].mean()

    trainer = distillation_stub(
        module.GKDTrainer,
        module.GKDConfig,
        {"gradient_accumulation_steps": 2},
        model_accepts_loss_kwargs=True,
        is_deepspeed_enabled=False,
        generalized_jsd_loss=mean_of_logits,
    )
    token_ids = torch.tensor([[1, 2, 3]])
    batch = {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "prompts": token_ids[:, :1]}
    batch["labels"] = torch.tensor([[-100, 2, 3]])
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(5))
    (gradient,) = torch.autograd.grad(loss, trainer.model.weight)
    return judge(float(gradient.sum()), right=2 / 5, wrong=1.0)
