"""DistillationTrainer and IW-OPD divide their loss by the dataset's labels, once for each micro-batch of the step.

Since TRL 1.7.0 (pull request 6006) ``compute_loss`` divides the sum over the tokens by ``num_items_in_batch``.
``Trainer`` counts these items over ``gradient_accumulation_steps`` batches of the dataloader. Each of these batches is
the whole data of the step: ``_RepeatBatchDataLoader`` repeats it. ``_fill_buffer`` splits the first one into
micro-batches, and replaces completions by those that the student writes. The factor of ``Trainer.compute_loss`` for
several ranks is missing, as in GOLD and GKD.

1.9.0 counts the tokens of the buffer in DistillationTrainer (pull request 6478). IW-OPD, new in 1.9.0, has the earlier
code. The wrapper counts as DistillationTrainer does.
"""

from __future__ import annotations

from inspect import signature
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import distillation_stub, divergence, trainer_and_config


@wrapper
def divide_by_the_tokens_of_the_buffer(call: Call) -> Any:
    """Give ``compute_loss`` the tokens of all micro-batches of the step, as a mean over the ranks."""
    trainer, counted = call.trainer, call["num_items_in_batch"]
    micro_batches = trainer._buffered_inputs if call.is_training else None
    if counted is None or micro_batches is None or not _takes_a_count(trainer):
        return call()
    tokens, ranks = sum((part["labels"] != -100).sum() for part in micro_batches), 1
    if trainer.args.average_tokens_across_devices:
        tokens, ranks = trainer.accelerator.gather(tokens).sum(), trainer.accelerator.num_processes
    tokens = tokens.clamp(min=1) / ranks
    if (tokens == counted).all():
        return call()
    return call.with_(num_items_in_batch=tokens)()


def _takes_a_count(trainer: Any) -> bool:
    """Return whether the loss takes a count: with a teacher server only that of IW-OPD does."""
    return not trainer.use_teacher_server or getattr(trainer, "distillation_objective", None) == "iw_opd"


def loss_is_divided_by_the_tokens_of_the_buffer(module: ModuleType) -> Outcome:
    """Find the divisor of the gradient of one of two micro-batches, which have 3 tokens and 1. The dataset has 10."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "IWOPD", "Distillation")
    if config_class is None:
        return absent("the trainer stands elsewhere, and is handed on here")
    if "num_items_in_batch" not in signature(trainer_class.generalized_jsd_loss).parameters:
        return absent("the loss is a mean over the micro-batch")
    token_ids = torch.tensor([[1, 2, 3, 4]])
    labels = (torch.tensor([[-100, 2, 3, 4]]), torch.tensor([[-100, -100, -100, 4]]))
    micro_batches = [
        {"input_ids": token_ids, "attention_mask": torch.ones_like(token_ids), "labels": each} for each in labels
    ]
    trainer = distillation_stub(
        trainer_class,
        config_class,
        {"distillation_objective": "jsd", "loss_top_k": 0},
        use_liger_loss=False,
        _local_teacher_tokenizer_matches_student=True,
        _buffered_inputs=micro_batches,
        _buffered_num_items=torch.tensor(3 + 1),  # 1.9 has counted them itself.
    )
    loss = trainer.compute_loss(trainer.model, micro_batches[0], num_items_in_batch=torch.tensor(10))
    total = divergence(trainer, token_ids).sum()
    gradient, of_total = (torch.autograd.grad(value, trainer.model.weight)[0].norm() for value in (loss, total))
    return judge(float(of_total / gradient), right=3 + 1, wrong=10)
