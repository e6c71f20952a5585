"""GOLD divides its loss by tokens that it does not train on, and by those that it trains on several times.

Since TRL 1.7.0 (pull request 6006) ``compute_loss`` divides the sum of the divergences over the tokens by
``num_items_in_batch``. ``Trainer`` counts these items over the labels of ``gradient_accumulation_steps`` batches of the
dataloader. In GOLD every one of these batches is the whole data of the optimizer step: ``RepeatSampler`` repeats it,
``_fill_buffer`` splits the first one into micro-batches and puts completions of the student into some of them. So the
count has the dataset's labels once for each micro-batch. The factor of ``Trainer.compute_loss`` for
several ranks is missing, as in GKD.

``DistillationTrainer``, which has the same buffer, counts the tokens of the buffer on all ranks, and divides by
the number of ranks (pull request 6478). The wrapper does the same: the buffer of a step is full before its first loss.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import distillation_stub, divergence


@wrapper
def divide_by_the_tokens_of_the_step(call: Call) -> Any:
    """Give ``compute_loss`` the tokens of all micro-batches of the step, as a mean over the ranks."""
    trainer, counted = call.trainer, call["num_items_in_batch"]
    # The loss across tokenizers takes no count.
    if counted is None or trainer.use_uld_loss:
        return call()
    micro_batches = trainer._buffered_inputs if call.is_training else None
    if micro_batches is None:
        return call()
    tokens, ranks = sum((part["labels"][:, 1:] != -100).sum() for part in micro_batches), 1
    if trainer.args.average_tokens_across_devices:
        tokens, ranks = trainer.accelerator.gather(tokens).sum(), trainer.accelerator.num_processes
    tokens = tokens.clamp(min=1) / ranks
    if (tokens == counted).all():
        return call()
    return call.with_(num_items_in_batch=tokens)()


def loss_is_divided_by_the_tokens_of_the_step(module: ModuleType) -> Outcome:
    """Find the divisor of the gradient of one of two micro-batches, which have 3 tokens and 1. The dataset has 10."""
    import torch

    if "num_items_in_batch" not in signature(module.GOLDTrainer.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    token_ids = torch.tensor([[1, 2, 3, 4]])
    labels = (token_ids, torch.tensor([[-100, -100, -100, 4]]))
    micro_batches = [
        {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "labels": each} for each in labels
    ]
    attributes: dict[str, Any] = {"temperature": 1.0, "teacher_tokenizer": None, "_buffered_inputs": micro_batches}
    trainer = distillation_stub(module.GOLDTrainer, module.GOLDConfig, **attributes)
    loss = trainer.compute_loss(trainer.model, micro_batches[0], num_items_in_batch=torch.tensor(10))
    total = divergence(trainer, token_ids).sum()
    gradient, of_total = (torch.autograd.grad(value, trainer.model.weight)[0].norm() for value in (loss, total))
    return judge(float(of_total / gradient), right=3 + 1, wrong=10)
