"""GKD divides the loss on generated completions by the token count of the dataset's labels.

Since TRL 1.7.0 (pull request 6006) ``compute_loss`` divides the sum of the divergences over the tokens by
``num_items_in_batch``. ``Trainer`` counts these items before the optimizer step, over the labels of all micro-batches
of the dataloader; ``training_step`` replaces the batch after that. Where the tokens of all ranks are counted,
``Trainer.compute_loss`` multiplies the loss by the number of ranks, since gradients are averaged over them. GKD's
``compute_loss`` does not.

``DistillationTrainer`` had both bugs. It now counts the tokens that it has generated, divided by the ranks (pull
request 6478), which it can since it generates for a whole optimizer step at once. GKD generates for each micro-batch,
and the token counts of the later ones are not known when the loss of the first is computed. The wrapper therefore
divides each by its own tokens times the number of micro-batches.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    Call,
    GeneratedLabels,
    absent,
    copies_of_a_loss_of_all_gpus,
    judge,
    micro_batches,
    wrapper,
)
from ...model import Outcome
from ...testing import distillation_stub, divergence

_generated = GeneratedLabels()


@wrapper
def note_what_is_generated(call: Call) -> Any:
    """Keep the labels for ``compute_loss``."""
    generated = call()
    _, _, labels = generated
    _generated.note(labels)
    return generated


@wrapper
def divide_by_the_tokens_of_the_loss(call: Call) -> Any:
    """Give ``compute_loss`` the number of tokens by which its sum, averaged over the ranks, must be divided."""
    items = call["num_items_in_batch"]
    if items is None:
        return call()
    labels = call["inputs"]["labels"]
    if _generated.are(labels):
        items = (labels != -100).sum().clamp(min=1) * micro_batches(call.trainer)
    else:
        ranks = copies_of_a_loss_of_all_gpus(call.trainer)
        if ranks == 1:
            return call()
        items = items / ranks
    return call.with_(num_items_in_batch=items)()


def loss_is_divided_by_its_own_tokens(module: ModuleType) -> Outcome:
    """Find the divisor of the gradient of three generated tokens, in one of two micro-batches. The dataset has 12."""
    import torch

    if "num_items_in_batch" not in signature(module.GKDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    trainer = distillation_stub(module.GKDTrainer, module.GKDConfig, current_gradient_accumulation_steps=2)
    prompts, written = torch.tensor([[1, 2]]), torch.tensor([[1, 2, 5, 6, 0]])
    batch = {"prompts": prompts, "prompt_attention_mask": torch.ones_like(prompts)}
    writer = SimpleNamespace(generate=lambda **kwargs: SimpleNamespace(sequences=written))
    generated = trainer.generate_on_policy_outputs(writer, batch, SimpleNamespace(eos_token_id=0))
    batch.update(zip(("input_ids", "attention_mask", "labels"), generated, strict=True))
    loss = trainer.compute_loss(trainer.model, batch, num_items_in_batch=torch.tensor(12))
    _generated.forget()
    total = (divergence(trainer, written) * (batch["labels"][:, 1:] != -100)).sum()
    gradient, of_total = (torch.autograd.grad(value, trainer.model.weight)[0].norm() for value in (loss, total))
    return judge(float(of_total / gradient), right=3 * 2, wrong=12)
