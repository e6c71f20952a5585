"""SFT divides the loss by a count that includes the first token of each sequence, which nothing predicts.

The trainer of transformers counts all ``L`` labels of a sequence in ``num_items_in_batch``. TRL's own sum of the loss
(1.15.0 and later) is divided by the same number. TRL counts nothing itself, so the wrapper changes the count of the
trainer: its labels are -100 on first tokens, which gives the count of ``labels[..., 1:]`` that transformers 5.10.1
makes.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent, act, judge
from ..model import Outcome
from ..testing import constructed, default_arguments, single_process, tiny_attention_model, tiny_tokenizer


def count_what_is_predicted(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and let it count the labels of a step without those of first tokens."""
    from transformers import Trainer

    wrapped(*args, **kwargs)
    # transformers 4.57 moved the count out of the method that fetches the batches of a step; evaluation uses it too.
    name = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"
    if getattr(type(instance), name) is getattr(Trainer, name) and _first_tokens_are_unpredicted(instance):
        # A nested function could not be pickled with the trainer.
        act()
        setattr(instance, name, functools.partial(_COUNTS[name], instance))


def _first_tokens_are_unpredicted(trainer: Any) -> bool:
    """Return whether the loss is TRL's or transformers' for causal models, with nothing before the first token."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, loss_func = trainer.model, getattr(trainer, "compute_loss_func", None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    if loss_func is not None and not getattr(loss_func, "__module__", "").startswith("trl."):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    is_decoder_only = not getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return is_decoder_only and getattr(base, "loss_function", None) is ForCausalLMLoss


def _num_items_in_batch(trainer: Any, batch_samples: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    batches = [_without_first_labels(batch) for batch in batch_samples]
    return type(trainer)._get_num_items_in_batch(trainer, batches, *args, **kwargs)


def _batch_samples(trainer: Any, epoch_iterator: Iterable[Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
    fetched: list[Any] = []

    def keep_and_mask(batch: Any) -> Any:
        fetched.append(batch)
        return _without_first_labels(batch)

    _, num_items_in_batch = type(trainer).get_batch_samples(
        trainer, map(keep_and_mask, epoch_iterator), *args, **kwargs
    )
    return fetched, num_items_in_batch


_COUNTS = {"_get_num_items_in_batch": _num_items_in_batch, "get_batch_samples": _batch_samples}


def _without_first_labels(batch: Any) -> Any:
    """Return the batch with ``labels`` ``(batch, length)`` that are -100 at position 0; unchanged if it has no such."""
    if not isinstance(batch, Mapping) or "shift_labels" in batch or getattr(batch.get("labels"), "ndim", 0) < 2:
        return batch
    batch = copy.copy(batch)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][..., 0] = -100
    return batch


def first_tokens_are_not_counted(module: ModuleType) -> Outcome:
    """Check the count of a trainer for a step of two micro-batches, with 3 and 2 tokens."""
    import torch
    from datasets import Dataset
    from transformers import Trainer

    if not hasattr(Trainer, "get_batch_samples"):
        return absent("this transformers divides by no count")
    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text", "loss_type": "nll"}
    arguments = {
        "model": tiny_attention_model(),
        "args": default_arguments(module.SFTConfig, **settings, n_gpu=1, average_tokens_across_devices=False),
        "train_dataset": Dataset.from_list([{"input_ids": [5, 6, 7]}]),
        "processing_class" if "processing_class" in parameters else "tokenizer": tiny_tokenizer(),
    }
    with single_process(module):
        trainer = constructed(module.SFTTrainer, **arguments)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = True, None
    trainer._loss_shifts_labels = True
    batches = [{"labels": torch.tensor([[5, 6, 7]])}, {"labels": torch.tensor([[5, 6, -100]])}]
    with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
    _, num_items_in_batch = trainer.get_batch_samples(iter(batches), 2, *(["cpu"] if with_device else []))
    return judge(float(num_items_in_batch), right=3.0, wrong=5.0)
