"""SFT divides the loss by a count that includes the first token of each sequence, which nothing predicts.

The trainer of transformers counts all ``L`` labels of a sequence in ``num_items_in_batch``. TRL's own sum of the loss
(1.15.0 and later) is divided by the same number. TRL counts nothing itself, so the wrapper changes the count of the
trainer: its labels are -100 on first tokens, which gives the count of ``labels[..., 1:]`` that transformers 5.10.1
makes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, virtual_tokens_come_first, wrapper
from ...model import Outcome
from ...testing import (
    as_tokenizer_of,
    constructed,
    default_arguments,
    quick_is_peft_model,
    quick_rows,
    single_process,
    tiny_attention_model,
    tiny_tokenizer,
)


@wrapper
def count_what_is_predicted(call: Call) -> Any:
    """Make the trainer, and let it count the labels of a step without those of first tokens."""
    from transformers import Trainer

    result, trainer = call(), call.trainer
    # transformers 4.57 moved the count out of the method that fetches the batches of a step; evaluation uses it too.
    name = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"
    # A nested function could not be pickled with the trainer.
    setattr(trainer, name, functools.partial(_COUNTS[name], trainer, call.act_later()))
    return result


def _num_items_in_batch(
    trainer: Any, act: Callable[[], None], batch_samples: Iterable[Any], *args: Any, **kwargs: Any
) -> Any:
    count = type(trainer)._get_num_items_in_batch
    if not _counts_unpredicted_tokens(trainer, "_get_num_items_in_batch"):
        return count(trainer, batch_samples, *args, **kwargs)
    act()
    return _at_least_one(count(trainer, [_without_first_labels(batch) for batch in batch_samples], *args, **kwargs))


def _batch_samples(
    trainer: Any, act: Callable[[], None], epoch_iterator: Iterable[Any], *args: Any, **kwargs: Any
) -> tuple[list[Any], Any]:
    fetch_and_count: Callable[..., tuple[list[Any], Any]] = type(trainer).get_batch_samples
    if not _counts_unpredicted_tokens(trainer, "get_batch_samples"):
        return fetch_and_count(trainer, epoch_iterator, *args, **kwargs)
    act()
    fetched: list[Any] = []

    def keep_and_mask(batch: Any) -> Any:
        fetched.append(batch)
        return _without_first_labels(batch)

    _, count = fetch_and_count(trainer, map(keep_and_mask, epoch_iterator), *args, **kwargs)
    return fetched, _at_least_one(count)


_COUNTS = {"_get_num_items_in_batch": _num_items_in_batch, "get_batch_samples": _batch_samples}


def _counts_unpredicted_tokens(trainer: Any, name: str) -> bool:
    """Return whether transformers counts, and nothing predicts the first token.

    That is so if the loss is TRL's or transformers' for causal models, with nothing before the first token.
    """
    from transformers import Trainer
    from transformers.loss.loss_utils import ForCausalLMLoss

    # A PEFT model has the loss function and the config of its base model.
    model, loss_func = trainer.model, getattr(trainer, "compute_loss_func", None)
    return (
        getattr(type(trainer), name) == getattr(Trainer, name)  # A patch on the class is a proxy, and equal.
        and not virtual_tokens_come_first(model)
        and (loss_func is None or getattr(loss_func, "__module__", "").startswith("trl."))
        and getattr(model, "loss_function", None) is ForCausalLMLoss
        and not model.config.is_encoder_decoder
    )


def _without_first_labels(batch: Any) -> Any:
    """Return the batch with ``labels`` ``(batch, length)`` that are -100 at position 0; unchanged if it has no such."""
    import torch

    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, torch.Tensor) or labels.ndim < 2 or "shift_labels" in batch:
        return batch
    labels = labels.clone()
    labels[..., 0] = -100
    return {**batch, "labels": labels}


def _at_least_one(count: Any) -> Any:
    """Return the count of all ranks, or 1 where no row has a second token: the loss is then 0, and not 0 / 0."""
    return None if count is None else count + (count == 0)


def first_tokens_are_not_counted(module: ModuleType) -> Outcome:
    """Count the labels of a step of two rows: seven are no padding, and five of these have a token before them."""
    import torch
    from transformers import Trainer

    if not hasattr(Trainer, "get_batch_samples"):
        return absent("this transformers divides by no count")
    settings: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text"}
    settings |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False, "loss_type": "nll"}
    # TRL sets a field of it for a stream.
    args = default_arguments(module.SFTConfig, accelerator_config=SimpleNamespace(dispatch_batches=None), **settings)
    given = {"args": args, **as_tokenizer_of(module.SFTTrainer, tiny_tokenizer())}
    rows = quick_rows([{"input_ids": [5]}])
    with single_process(module), quick_is_peft_model(module):
        trainer = constructed(module.SFTTrainer, model=tiny_attention_model(), train_dataset=rows, **given)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func, trainer._loss_shifts_labels = True, None, True
    trainer.get_tp_size = trainer.get_cp_size = trainer.get_sp_size = lambda: 1
    # Which arguments it takes depends on transformers.
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    step = [{"labels": torch.tensor([[5, 6, 7, 8], [9, 5, 6, -100]])}]
    _, count = trainer.get_batch_samples(iter(step), 1, *device)
    return judge(float(count), right=5.0, wrong=7.0)
