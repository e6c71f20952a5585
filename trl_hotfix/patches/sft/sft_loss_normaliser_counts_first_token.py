"""SFT divides the loss by a count that includes the first token of each sequence, which nothing predicts.

The trainer of transformers counts all ``L`` labels of a sequence in ``num_items_in_batch``. TRL's own sum of the loss
(1.15.0 and later) is divided by the same number. TRL counts nothing itself, so the wrapper changes the count of the
trainer: its labels are -100 on first tokens, which gives the count of ``labels[..., 1:]`` that transformers 5.10.1
makes.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act_of_this_call, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import constructed, default_arguments, single_process, tiny_attention_model, tiny_tokenizer


def count_what_is_predicted(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Make the trainer, and let it count the labels of a step without those of first tokens."""
    from transformers import Trainer

    wrapped(*args, **kwargs)
    # transformers 4.57 moved the count out of the method that fetches the batches of a step; evaluation uses it too.
    name = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"
    # A nested function could not be pickled with the trainer.
    setattr(instance, name, functools.partial(_COUNTS[name], instance, act_of_this_call()))


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
        getattr(type(trainer), name) is getattr(Trainer, name)
        and not getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
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
    """Check the counts of a trainer, each for a step of two micro-batches of two rows."""
    import torch
    import transformers
    from packaging.version import Version
    from transformers import Trainer

    if not hasattr(Trainer, "get_batch_samples"):
        return absent("this transformers divides by no count")
    # The last batch belongs to the next step.
    step = [_labels([5, 6, 7, 8], [9, 5, 6, -100]), _labels([5, 6], [-100, 7]), _labels([5, 6, 7])]
    one_token_a_row = [_labels([5], [6]), _labels([7], [8])]
    before = [batch["labels"].clone() for batch in step]
    trainer = _trainer(module)
    outcome = judge(_count(trainer, step) or 0.0, right=7.0, wrong=10.0)
    if outcome.verdict is Verdict.REPRODUCED:
        return outcome
    counts = {
        "the same step again": (_count(trainer, step), 7),
        "no labels": (_count(trainer, [{"input_ids": batch["labels"]} for batch in step]), None),
        "no names": (_count(trainer, [(batch["labels"],) for batch in step]), None),
    }
    with shadowed(trainer, "compute_loss_func", _loss_of_trl):
        counts["a loss of TRL's"] = (_count(trainer, step), 7)
    with _another_rank_with(4, trainer):
        counts |= {
            "7 tokens here, 4 on another rank": (_count(trainer, step), 11),
            "one token a row here, 4 tokens on another rank": (_count(trainer, one_token_a_row), 4),
        }
    if hasattr(Trainer, "_get_num_items_in_batch"):
        counts["evaluation"] = (float(trainer._get_num_items_in_batch(step[:1], "cpu")), 5)
    if Version(transformers.__version__) < Version("5.10.1"):
        shifted = [{**batch, "shift_labels": batch["labels"]} for batch in step]
        classes = [{"labels": batch["labels"][0]} for batch in step]
        counts |= {
            "one token a row": (_count(trainer, one_token_a_row), 1),
            "labels that are shifted already": (_count(trainer, shifted), 10),
            "labels that are no sequence": (_count(trainer, classes), 6),
            **{name: (count, 10) for name, count in _right_counts(trainer, step)},
        }
    wrong = {name: count for name, (count, right) in counts.items() if count != right}
    if wrong:
        raise AssertionError(f"wrong counts of tokens: {wrong}")
    if not all(torch.equal(batch["labels"], labels) for batch, labels in zip(step, before, strict=True)):
        raise AssertionError("the labels of the batches are changed")
    return outcome


def _labels(*rows: list[int]) -> dict[str, Any]:
    import torch

    return {"labels": torch.tensor(rows)}


def _count(trainer: Any, batches: list[Any]) -> float | None:
    """Return the count of the first two batches, which must come back as they are."""
    from transformers import Trainer

    # A trainer that counts itself takes whatever it is given.
    with_device = "device" in inspect.signature(Trainer.get_batch_samples).parameters
    iterator = iter(batches)
    fetched, count = trainer.get_batch_samples(iterator, 2, *(["cpu"] if with_device else []))
    if len(fetched) != 2 or [id(batch) for batch in [*fetched, *iterator]] != [id(batch) for batch in batches]:
        raise AssertionError("the batches of the step are not those of the dataloader")
    return None if count is None else float(count)


def _trainer(module: ModuleType) -> Any:
    from datasets import Dataset

    parameters = inspect.signature(module.SFTTrainer.__init__).parameters
    settings: dict[str, Any] = {
        "dataset_kwargs": {"skip_prepare_dataset": True},
        "dataset_text_field": "text",
        "loss_type": "nll",
    }
    settings |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False}
    arguments = {
        "model": tiny_attention_model(),
        "args": default_arguments(module.SFTConfig, **settings),
        "train_dataset": Dataset.from_list([{"input_ids": [5, 6, 7]}]),
        "processing_class" if "processing_class" in parameters else "tokenizer": tiny_tokenizer(),
    }
    with single_process(module):
        trainer = constructed(module.SFTTrainer, **arguments)
    trainer.model_accepts_loss_kwargs, trainer.compute_loss_func = True, None
    trainer._loss_shifts_labels = True
    trainer.get_tp_size = trainer.get_cp_size = trainer.get_sp_size = lambda: 1
    return trainer


def _loss_of_trl(*args: Any, **kwargs: Any) -> Any: ...


_loss_of_trl.__module__ = "trl.trainer.sft_trainer"


def _another_rank_with(count: int, trainer: Any) -> ExitStack:
    """Have the count of another rank added to those of ``trainer`` in the block."""
    import torch

    def gather(own: Any) -> Any:
        return torch.stack([own, torch.tensor(count)])

    stack = ExitStack()
    stack.enter_context(shadowed(trainer.args, "average_tokens_across_devices", True))
    stack.enter_context(shadowed(trainer.args, "world_size", 2))
    stack.enter_context(shadowed(trainer.accelerator, "gather", gather))
    return stack


def _right_counts(trainer: Any, step: list[Any]) -> Iterator[tuple[str, float | None]]:
    """Give the counts where the loss has a term for first tokens too, or is not known, or the trainer counts itself."""
    from transformers import Trainer

    name = "_get_num_items_in_batch" if hasattr(Trainer, "_get_num_items_in_batch") else "get_batch_samples"

    def own_loss(*args: Any, **kwargs: Any) -> Any: ...

    def own_count(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(Trainer, name)(self, *args, **kwargs)

    model = trainer.model
    exits = {
        "an encoder-decoder model": (model.config, "is_encoder_decoder", True),
        "virtual tokens": (model, "active_peft_config", SimpleNamespace(is_prompt_learning=True)),
        "a model with a loss of its own": (type(model), "loss_function", own_loss),
        "a loss of the user's": (trainer, "compute_loss_func", own_loss),
        "a trainer that counts itself": (type(trainer), name, own_count),
    }
    for what, (owner, attribute, value) in exits.items():
        with shadowed(owner, attribute, value):
            yield what, _count(trainer, step)
