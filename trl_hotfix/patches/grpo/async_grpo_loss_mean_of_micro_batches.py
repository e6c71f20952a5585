"""AsyncGRPO and AsyncDistillation take the mean of the means of the micro-batches of a step.

The collator counts the trained tokens of a micro-batch over all ranks, ``global_n_tokens``. ``compute_loss`` divides
the sum of the micro-batch by this count, and by the micro-batches of the step. Pull request 7249 divides by the tokens
of the step instead.

Transformers fetches all micro-batches of a step before the first is trained on, so ``get_batch_samples``, which these
trainers inherit, has all counts. ``compute_loss`` reads the count for the loss, and adds it up for the tokens a second.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome
from ...testing import stub_trainer

_COUNT = "global_n_tokens"


@wrapper
def count_the_tokens_of_the_step(call: Call) -> Any:
    """Give each micro-batch the mean count of the step: times the micro-batches, it is the tokens of the step."""
    batches, count = call()
    # One number, repeated for each row: the last micro-batch of a queue that ends (before 1.6) has fewer rows.
    counts = [batch[_COUNT][0] for batch in batches if _COUNT in batch]
    if len(counts) == len(batches) > 1:
        call.act()
        for batch in batches:
            batch[_COUNT] = (sum(counts) / len(counts)).expand_as(batch[_COUNT])
    return batches, count


def tokens_of_a_step_weigh_the_same(module: ModuleType) -> Outcome:
    """Return how many times as much a token of a micro-batch of 2 weighs as one of a micro-batch of 18."""
    import torch
    from transformers import Trainer

    trainer_class = getattr(module, "AsyncGRPOTrainer", None) or module.AsyncDistillationTrainer
    settings = SimpleNamespace(world_size=1, n_gpu=1, average_tokens_across_devices=False)
    attributes = {"model_accepts_loss_kwargs": False, "compute_loss_func": None, "is_tp_enabled": False}
    trainer = stub_trainer(trainer_class, settings, **attributes)
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    step = [{_COUNT: torch.tensor([tokens])} for tokens in (2.0, 18.0)]
    (first, second), _ = trainer.get_batch_samples(iter(step), 2, *device)
    return judge(float(second[_COUNT][0] / first[_COUNT][0]), right=1.0, wrong=9.0)
