"""In SFT's flattened batches sequences attend to one another, and first tokens are labels.

``padding_free=True``, and from 0.19.0 on packing (its default strategy), make one row of all sequences of a batch.
Only FlashAttention, which starts again where the position ids do, separates them. What the batch lacks depends on the
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
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from ...authoring import (
    Call,
    Once,
    absent,
    attention_keeps_apart,
    flattened_again,
    in_rows,
    isolated,
    judge,
    places_in_rows,
    plain_model,
    wrapper,
)
from ...model import Outcome
from ...testing import flattened_batch, gradient_of_seen, model_of_means, sft_trainer_of

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


@wrapper
def fit_the_collator(call: Call) -> None:
    """Make the trainer, and let its collator mask prompts and stay patched in worker processes."""
    call()
    trainer = call.trainer
    collator: Any = trainer.data_collator
    # Up to 0.18 it is transformers' DataCollatorWithFlattening: TRL refuses any other one with padding_free.
    is_of_trl = hasattr(collator, "padding_free")
    if is_of_trl and collator.padding_free and trainer.args.dataloader_num_workers:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
        call.act()
    elif not is_of_trl and trainer.args.padding_free and getattr(trainer, "completion_only_loss", None):
        trainer.data_collator = _CompletionsOnly(collator)
        call.act()


class _CompletionsOnly:
    """transformers' flattening collator, which knows labels but not the ``completion_mask`` of TRL 0.17 and 0.18."""

    def __init__(self, collate: Callable[..., Any]) -> None:
        self.collate = collate

    def __call__(self, features: Any) -> Any:
        return self.collate(
            [
                {**example, "labels": _labels(example)} if "completion_mask" in example else example
                for example in features
            ]
        )


def _labels(example: Mapping[str, Any]) -> list[int]:
    """Return the labels of an example: -100 outside of the completion."""
    pairs = zip(example["input_ids"], example["completion_mask"], strict=True)
    return [token if is_completion else -100 for token, is_completion in pairs]


@wrapper
def say_where_sequences_begin(call: Call) -> Any:
    """Turn the collator's batch into the one that 0.23.1 emits."""
    batch = call()
    if not getattr(call.trainer, "padding_free", None):
        return batch
    import torch

    positions: list[int] = []
    for example in call["examples"]:
        if "seq_lengths" in example:
            positions += [position for length in example["seq_lengths"] for position in range(length)]
        else:
            positions += example.get("position_ids", range(len(example["input_ids"])))
    # Padding to a multiple comes last; each of its tokens becomes a sequence of its own without a label.
    padding_length = batch["input_ids"].shape[1] - len(positions)
    call.act()
    batch["position_ids"] = torch.tensor([[*positions, *[0] * padding_length]])
    batch["labels"][batch["position_ids"] == 0] = -100
    batch.pop("attention_mask", None)
    return batch


@wrapper
def keep_the_sequences_apart(call: Call) -> Any:
    """Compute the loss of a flattened batch so that no sequence attends to another."""
    trainer, model, inputs = call.trainer, call["model"], call["inputs"]
    if not _is_flattened(trainer, inputs):
        return call()
    plain = plain_model(trainer, model)
    separation = attention_keeps_apart(plain)
    if separation == "flash":
        return call()
    places = places_in_rows(inputs["position_ids"], several=separation == "mask")
    batch = in_rows(inputs, places)
    if separation == "mask":
        model = isolated(model, batch["position_ids"], _dtype_of_attention(trainer, plain))
    else:
        _warn_about_padding(trainer, plain)
        del batch["position_ids"]
    result = call.with_(model=model, inputs=batch)()
    if call["return_outputs"]:
        flattened_again(result[1], places)
    return result


def _dtype_of_attention(trainer: Any, model: Any) -> Any:
    """Return the dtype of the attention's queries: that of mixed precision, or of the weights."""
    import torch

    if trainer.accelerator.native_amp:
        return torch.float16 if trainer.accelerator.mixed_precision == "fp16" else torch.bfloat16
    return model.get_input_embeddings().weight.dtype


def _is_flattened(trainer: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether TRL made one row of the batch. A row without restarts is right in any case."""
    if not getattr(trainer, "padding_free", trainer.args.padding_free):
        return False
    position_ids = inputs.get("position_ids")
    return (
        position_ids is not None
        and "attention_mask" not in inputs
        and position_ids.shape[0] == 1
        and position_ids.shape == inputs["input_ids"].shape
    )


def _warn_about_padding(trainer: Any, model: Any) -> None:
    if _first_warning(trainer):
        _log.warning(
            "padding_free and packing make one row of a batch, whose sequences %s with attn_implementation=%r is not "
            "known to keep apart. They are trained as padded batches: right, but no faster than without padding_free. "
            "For rows without padding, load the model with attn_implementation='flash_attention_2' (by name: "
            "model_init_kwargs)",
            type(model).__name__,
            getattr(getattr(model, "config", None), "_attn_implementation", None),
        )


def flattened_batch_has_the_loss_of_the_padded_one(module: ModuleType) -> Outcome:
    """Differentiate the loss of the second of two sequences by what its tokens have seen."""
    if "padding_free" not in module.SFTConfig.__dataclass_fields__:
        return absent("SFTConfig has no padding_free")
    batch, model = flattened_batch(module), model_of_means(keeps_apart=True)
    loss = sft_trainer_of(module, model).compute_loss(model, dict(batch))
    measured, right, in_one_row = gradient_of_seen(model, loss)
    return judge(measured, right=right, wrong=in_one_row / int((batch["labels"] != -100).sum()))
