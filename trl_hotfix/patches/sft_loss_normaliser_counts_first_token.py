"""SFT divides the loss by a token of each sequence that nothing predicts.

A causal language model predicts the second token from the first, and so on: a sequence of ``L`` tokens has ``L - 1``
terms of loss. transformers from 4.46 on sums them and divides by ``num_items_in_batch``, which its trainer counts over
all ``L`` labels. Loss and gradient are ``(L - 1) / L`` of what they should be, the less the shorter the sequences, and
the same data weighs more in packed sequences than in padded ones. TRL's own sum (1.15.0 and later) is divided by the
same number.

transformers 5.11.0 (pull request 46204) counts ``labels[..., 1:]`` for such models; TRL has nothing to mend it with.
Here a trainer's count does not see the labels of first tokens. The count is left as it is where the first token is
predicted or the user counts or computes: encoder-decoder models and losses of their own, PEFT's prompt learning, whose
virtual tokens come first, a ``compute_loss_func`` that is given, and a class that counts by itself.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent, judge
from ..model import Outcome
from ..stubs import constructed, default_arguments, single_process, tiny_attention_model, tiny_tokenizer


def count_what_is_predicted(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Have the trainer that is made here count the labels of a step without those of first tokens."""
    from transformers import Trainer

    wrapped(*args, **kwargs)
    # transformers 4.57 took the count out of the method that fetches a step's batches; evaluation counts by it too.
    name = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"
    if getattr(type(instance), name) is getattr(Trainer, name) and _first_tokens_are_given(instance):
        # No nested function: it is to be pickled if the trainer is.
        setattr(instance, name, functools.partial(_COUNTS[name], instance))


def _first_tokens_are_given(trainer: Any) -> bool:
    """Is the loss TRL's or transformers' own for causal language models, with nothing before the first token?"""
    from transformers.loss.loss_utils import ForCausalLMLoss

    model, function = trainer.model, getattr(trainer, "compute_loss_func", None)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return False
    if function is not None and not getattr(function, "__module__", "").startswith("trl."):
        return False
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    decodes_only = not getattr(getattr(base, "config", None), "is_encoder_decoder", False)
    return decodes_only and getattr(base, "loss_function", None) is ForCausalLMLoss


def _num_items_in_batch(trainer: Any, batch_samples: Iterable[Any], *args: Any, **kwargs: Any) -> Any:
    its = [_without_first_labels(batch) for batch in batch_samples]
    return type(trainer)._get_num_items_in_batch(trainer, its, *args, **kwargs)


def _batch_samples(trainer: Any, epoch_iterator: Iterable[Any], *args: Any, **kwargs: Any) -> tuple[list[Any], Any]:
    fetched: list[Any] = []

    def counted(batch: Any) -> Any:
        fetched.append(batch)
        return _without_first_labels(batch)

    _, num_items_in_batch = type(trainer).get_batch_samples(trainer, map(counted, epoch_iterator), *args, **kwargs)
    return fetched, num_items_in_batch


_COUNTS = {"_get_num_items_in_batch": _num_items_in_batch, "get_batch_samples": _batch_samples}


def _without_first_labels(batch: Any) -> Any:
    """The batch with ``labels``, ``(batch, length)``, that are -100 in the first place; as it is if it has others."""
    if not isinstance(batch, Mapping) or "shift_labels" in batch or getattr(batch.get("labels"), "ndim", 0) < 2:
        return batch
    batch = copy.copy(batch)
    batch["labels"] = batch["labels"].clone()
    batch["labels"][..., 0] = -100
    return batch


def first_tokens_are_not_counted(module: ModuleType) -> Outcome:
    """The count of a step of two micro-batches, with 3 and 2 tokens, by a trainer that is made for it."""
    import torch
    from datasets import Dataset
    from transformers import Trainer

    if not hasattr(Trainer, "get_batch_samples"):
        return absent("this transformers divides by no count")
    known = inspect.signature(module.SFTTrainer.__init__).parameters
    settings = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text", "loss_type": "nll"}
    given = {
        "model": tiny_attention_model(),
        "args": default_arguments(module.SFTConfig, **settings, n_gpu=1, average_tokens_across_devices=False),
        "train_dataset": Dataset.from_list([{"input_ids": [5, 6, 7]}]),
        "processing_class" if "processing_class" in known else "tokenizer": tiny_tokenizer(),
    }
    with single_process(module):
        trainer = constructed(module.SFTTrainer, **given)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = True, None
    trainer._loss_shifts_labels = True
    batches = [{"labels": torch.tensor([[5, 6, 7]])}, {"labels": torch.tensor([[5, 6, -100]])}]
    with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
    _, counted = trainer.get_batch_samples(iter(batches), 2, *(["cpu"] if with_device else []))
    return judge(float(counted), right=3.0, wrong=5.0)
