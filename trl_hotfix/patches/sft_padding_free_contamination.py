"""In SFT's flattened batches sequences attend to one another, and first tokens are labels.

``padding_free=True``, and from 0.19.0 on packing (its default strategy), make one row of all sequences of a batch.
Only FlashAttention, which starts anew where the position ids do, separates them. What the batch lacks depends on the
release:

- 0.16.0-0.18.2: the batch has position ids. transformers before 4.53 ignores them; later releases use them only while
  there is no KV cache. 0.17 and 0.18 flatten with transformers' collator, which does not know TRL's
  ``completion_mask``.
- 0.19.0-0.23.0: TRL's own collator emits an attention mask of ones and, without FlashAttention, no position ids, so
  every transformers release sees one long sequence. With FlashAttention too, the first token of a sequence is a
  label, which is predicted from the last token of the sequence before. 0.23.1 (pull request 4170) repaired both;
  issue 2834.

The collator is given 0.23.1's position ids: from the lengths of the rows, or from the borders that packing has noted
(column ``position_ids`` in 0.19, ``seq_lengths`` later). First labels are removed in the collator because
transformers counts the labels before ``compute_loss``. ``compute_loss`` knows the model, so the attention is repaired
there.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, argument, attention_keeps_apart, isolated, judge, padded, replaced_argument
from ..model import Outcome
from ..testing import default_arguments, stub_trainer, tiny_attention_model

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def fit_the_collator(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the trainer, and let its collator mask prompts and stay patched in worker processes."""
    result = wrapped(*args, **kwargs)
    collator: Any = instance.data_collator
    if type(collator).__name__ == "DataCollatorWithFlattening" and instance.args.padding_free:
        if getattr(instance, "completion_only_loss", False):
            act()
            instance.data_collator = _CompletionsOnly(collator)
    elif getattr(collator, "padding_free", False) and instance.args.dataloader_num_workers > 0:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
        act()
    return result


class _CompletionsOnly:
    """transformers' flattening collator, which knows labels but not the ``completion_mask`` of TRL 0.17 and 0.18."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, features: Any) -> Any:
        if "completion_mask" in features[0]:
            features = [{**example, "labels": _labels(example)} for example in features]
        return self.collate(features)


def _labels(example: Mapping[str, Any]) -> list[int]:
    """Return the labels of an example: -100 outside of the completion."""
    pairs = zip(example["input_ids"], example["completion_mask"], strict=True)
    return [token if is_completion else -100 for token, is_completion in pairs]


def say_where_sequences_begin(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Turn the collator's batch into the one that 0.23.1 emits."""
    batch = wrapped(*args, **kwargs)
    if not getattr(instance, "padding_free", False):
        return batch
    import torch

    positions: list[int] = []
    for example in argument(wrapped, args, kwargs, "examples"):
        if "seq_lengths" in example:
            positions += [position for length in example["seq_lengths"] for position in range(length)]
        else:
            positions += example.get("position_ids", range(len(example["input_ids"])))
    # Padding to a multiple comes last; each of its tokens becomes a sequence of its own without a label.
    padding_length = batch["input_ids"].shape[1] - len(positions)
    act()
    batch["position_ids"] = torch.tensor([[*positions, *[0] * padding_length]])
    batch["labels"][batch["position_ids"] == 0] = -100
    batch.pop("attention_mask", None)
    return batch


def keep_the_sequences_apart(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Compute the loss of a flattened batch so that no sequence attends to another."""
    inputs = argument(wrapped, args, kwargs, "inputs")
    if not _is_flattened(instance, inputs):
        return wrapped(*args, **kwargs)
    model = argument(wrapped, args, kwargs, "model")
    plain_model = instance.accelerator.unwrap_model(model)
    separation = attention_keeps_apart(plain_model)
    if separation == "flash":
        return wrapped(*args, **kwargs)
    if separation == "mask":
        view = isolated(model, inputs["position_ids"], plain_model.get_input_embeddings().weight.dtype)
        args, kwargs = replaced_argument(wrapped, args, kwargs, "model", view)
        return wrapped(*args, **kwargs)
    _warn_about_padding(instance, plain_model)
    batch = padded(inputs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", batch)
    result = wrapped(*args, **kwargs)
    if argument(wrapped, args, kwargs, "return_outputs"):
        # Evaluation compares the logits with the labels of the caller's batch, which is flattened.
        is_token = batch["attention_mask"].bool()
        outputs = result[1]
        if getattr(outputs, "logits", None) is not None and outputs.logits.shape[:2] == is_token.shape:
            outputs["logits"] = outputs.logits[is_token][None]
    return result


def _is_flattened(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether TRL made one row of the batch. A row without restarts is right in any case."""
    if not getattr(trainer, "padding_free", getattr(trainer.args, "padding_free", False)):
        return False
    position_ids = inputs.get("position_ids")
    return (
        position_ids is not None
        and "attention_mask" not in inputs
        and position_ids.shape[0] == 1
        and position_ids.shape == inputs["input_ids"].shape
    )


def _warn_about_padding(trainer: Any, model: Any) -> None:
    if trainer in _warned:
        return
    _warned.add(trainer)
    logging.getLogger("trl_hotfix").warning(
        "padding_free and packing make one row of a batch, whose sequences %s with attn_implementation=%r is not known "
        "to keep apart. They are trained as padded batches: right, but no faster than without padding_free. For rows "
        "without padding, load the model with attn_implementation='flash_attention_2' (by name: model_init_kwargs)",
        type(model).__name__,
        getattr(getattr(model, "config", None), "_attn_implementation", None),
    )


def flattened_batch_has_the_loss_of_the_padded_one(module: ModuleType) -> Outcome:
    """Check that rows that pass the collator and ``compute_loss`` have the mean loss over the tokens of all sequences.

    The wrong loss is that of the collator's batch as one sequence, with plain causal attention.
    """
    import torch

    config = default_arguments(module.SFTConfig)
    if not hasattr(config, "padding_free"):
        return absent("SFTConfig has no padding_free")
    rows = [[3, 5, 7, 9], [4, 4, 11, 2, 6, 13], [8, 10]]
    collator_class = module.DataCollatorForLanguageModeling
    fields = getattr(collator_class, "__dataclass_fields__", {})
    if "padding_free" in fields:
        without_flash = {"return_position_ids": False} if "return_position_ids" in fields else {}
        collator = collator_class(pad_token_id=0, padding_free=True, **without_flash)
    else:
        collator = module.DataCollatorWithFlattening()
    batch = dict(collator([{"input_ids": row} for row in rows]))
    model = tiny_attention_model()

    def cross_entropy(logits: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum", ignore_index=-100)

    with torch.no_grad():
        sequences = [torch.tensor([row]) for row in rows]
        right = sum(float(cross_entropy(model(input_ids=sequence).logits, sequence)) for sequence in sequences)
        ids, labels = batch["input_ids"], batch["labels"]
        length = ids.shape[1]
        causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = batch.get("position_ids", torch.arange(length)[None])
        logits_of_one_sequence = model(
            input_ids=ids, position_ids=positions, attention_mask=causal, use_cache=False
        ).logits
        wrong = float(cross_entropy(logits_of_one_sequence, labels))
    label_count = int((labels[:, 1:] != -100).sum())
    trainer = stub_trainer(
        module.SFTTrainer,
        config,
        model=model,
        padding_free=True,
        aux_loss_enabled=False,
        label_smoother=None,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        num_virtual_tokens=0,
        current_gradient_accumulation_steps=1,
        control=SimpleNamespace(should_evaluate=False),
        _metrics=_Log(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    trainer.accelerator.parallelism_config = None
    loss = float(trainer.compute_loss(model, batch).detach())
    return judge(
        loss,
        right=right / sum(len(row) - 1 for row in rows),
        wrong=wrong / label_count,
        tokens=label_count,
        keys=sorted(batch),
    )


class _Log(dict):  # type: ignore[type-arg]
    """Accepts ``[mode][name].append`` and, as some releases call it, ``[name].append``."""

    def __missing__(self, key: str) -> Any:
        return _Log()

    def append(self, value: float) -> None: ...
