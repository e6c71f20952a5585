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

import copy
import functools
import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import (
    Once,
    absent,
    act,
    argument,
    attention_keeps_apart,
    in_rows,
    isolated,
    judge,
    places_in_rows,
    plain_model,
    replaced_argument,
    shadowed,
)
from ...model import Outcome, Verdict
from ...testing import (
    StopConstruction,
    constructed,
    default_arguments,
    single_process,
    stub_trainer,
    tiny_attention_model,
    tiny_tokenizer,
)

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


def fit_the_collator(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Make the trainer, and let its collator mask prompts and stay patched in worker processes."""
    result = wrapped(*args, **kwargs)
    collator: Any = instance.data_collator
    # Up to 0.18 it is transformers' DataCollatorWithFlattening: TRL refuses any other one with padding_free.
    is_of_trl = hasattr(collator, "padding_free")
    if is_of_trl and collator.padding_free and instance.args.dataloader_num_workers:
        # A worker that is not forked unpickles the collator and imports an unpatched class. A patched function is
        # pickled under a name of trl_hotfix, which applies the patch in the worker as well. A bound method is pickled
        # under its own name.
        collator.torch_call = functools.partial(type(collator).torch_call, collator)
        act()
    elif not is_of_trl and instance.args.padding_free and getattr(instance, "completion_only_loss", None):
        instance.data_collator = _CompletionsOnly(collator)
        act()
    return result


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


def say_where_sequences_begin(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Turn the collator's batch into the one that 0.23.1 emits."""
    batch = wrapped(*args, **kwargs)
    if not getattr(instance, "padding_free", None):
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
    inputs, model = (argument(wrapped, args, kwargs, name) for name in ("inputs", "model"))
    plain = plain_model(instance, model)
    separation = attention_keeps_apart(plain) if _is_flattened(instance, inputs) else "padding"
    if separation not in ("mask", "pad"):
        return wrapped(*args, **kwargs)
    places = places_in_rows(inputs["position_ids"], several=separation == "mask")
    batch = in_rows(inputs, places)
    if separation == "mask":
        view = isolated(model, batch["position_ids"], _dtype_of_attention(instance, plain))
        args, kwargs = replaced_argument(wrapped, args, kwargs, "model", view)
    else:
        _warn_about_padding(instance, plain)
        del batch["position_ids"]
    args, kwargs = replaced_argument(wrapped, args, kwargs, "inputs", batch)
    result = wrapped(*args, **kwargs)
    if argument(wrapped, args, kwargs, "return_outputs"):
        # Evaluation compares the logits with the labels of the caller's batch, which is flattened.
        outputs = result[1]
        if getattr(outputs, "logits", None) is not None and outputs.logits.shape[:2] == batch["input_ids"].shape:
            outputs["logits"] = outputs.logits[places][None]
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


_Rows = tuple[list[int], ...]

_STEPS: tuple[tuple[_Rows, ...], ...] = (
    (([3, 5, 7, 9], [4, 4, 11, 2, 6, 13], [8, 10]), ([2, 6, 4], [12, 5, 9, 3, 7])),
    (([9, 3, 12, 6, 2], [5, 11, 14]), ([7, 13, 3], [10, 2, 8, 4], [6, 9, 5, 11, 3])),
)
"""The sequences of two steps of two micro-batches. Two tokens of each second one are a prompt."""


def flattened_batch_has_the_loss_of_the_padded_one(module: ModuleType) -> Outcome:
    """Check rows that pass the collator of a trainer and ``compute_loss``, in training and in evaluation.

    Right is the mean cross-entropy over the completions, of each sequence alone. Wrong is that of the collator's batch
    as one sequence, with plain causal attention. Gradients are compared for each micro-batch.
    """
    if not hasattr(default_arguments(module.SFTConfig), "padding_free"):
        return absent("SFTConfig has no padding_free")
    model = tiny_attention_model()
    trainer, collate = _stub(module, model), _trainer_of_one_row(module, model).data_collator
    numbers = {"measured": 0.0, "right": 0.0, "wrong": 0.0}
    mistakes: list[str] = []
    for step, micro_batches in enumerate(_STEPS):
        trainer.state.global_step = step
        for rows in micro_batches:
            mistakes += _add_measurement(numbers, trainer, rows, collate(_examples(collate, rows)))
    outcome = judge(**numbers)
    if outcome.verdict is Verdict.FIXED:
        second = _trainer_of_one_row(module, model, dataloader_num_workers=1).data_collator
        batch = second(_examples(second, _STEPS[0][0]))
        mistakes += _mistakes_elsewhere(module, batch)
        mistakes += _mistakes_of_collators(module, second, batch)
        mistakes += _mistakes_of_calls(module, dict(batch))
        if mistakes:
            raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, model: Any) -> Any:
    """Return a trainer for ``compute_loss``, which is not constructed."""
    trainer = stub_trainer(
        module.SFTTrainer,
        default_arguments(module.SFTConfig, n_gpu=1),
        model=model,
        padding_free=True,
        aux_loss_enabled=False,
        label_smoother=None,
        compute_loss_func=None,
        model_accepts_loss_kwargs=False,
        num_virtual_tokens=0,
        current_gradient_accumulation_steps=1,
        control=SimpleNamespace(should_evaluate=False),
        state=SimpleNamespace(global_step=0),
        _metrics=_Log(),
        _total_train_tokens=0,
        _tp_size=1,
    )
    vars(trainer.accelerator).update(parallelism_config=None, native_amp=False)
    # It is no user's, so the wrapper must not warn about it.
    _first_warning(trainer)
    return trainer


def _trainer_of_one_row(
    module: ModuleType, model: Any, *, prompts: bool = True, data_collator: Any = None, **settings: Any
) -> Any:
    """Return a trainer as its constructor leaves it, with ``padding_free`` and prompts that are not trained on."""
    from datasets import Dataset

    # Releases before 0.17 know no prompts.
    trainer_class = type("SFTTrainer", (module.SFTTrainer,), {"completion_only_loss": prompts})
    usual = {"padding_free": True, "completion_only_loss": prompts, "loss_type": "nll", "max_length": None}
    usual |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False, "pad_to_multiple_of": None}
    with single_process(module):
        return constructed(
            trainer_class,
            model=model,
            args=default_arguments(
                module.SFTConfig, dataset_kwargs={"skip_prepare_dataset": True}, **{**usual, **settings}
            ),
            data_collator=data_collator,
            train_dataset=Dataset.from_list([{"input_ids": [5, 6, 7]}]),
            processing_class=tiny_tokenizer(),
        )


def _completion_masks(rows: _Rows) -> list[list[int]]:
    return [[int(place >= 2 * (number % 2)) for place in range(len(row))] for number, row in enumerate(rows)]


def _examples(collate: Any, rows: _Rows) -> list[dict[str, list[int]]]:
    """Return what a dataset has of these sequences, under the names of this release."""
    examples = [
        {"input_ids": row, "completion_mask": mask} for row, mask in zip(rows, _completion_masks(rows), strict=True)
    ]
    fields = getattr(collate, "__dataclass_fields__", {})
    if "padding_free" in fields and "completion_only_loss" not in fields:
        # These releases take the prompts out when they prepare the dataset.
        return [{**example, "labels": _labels(example)} for example in examples]
    return examples


def _add_measurement(numbers: dict[str, float], trainer: Any, rows: _Rows, batch: Any) -> list[str]:
    """Add the loss of a batch of ``rows`` to ``numbers``. Return what is wrong with its gradients."""
    import torch

    model, pad = trainer.model, torch.nn.utils.rnn.pad_sequence
    ids, mask = (
        pad([torch.tensor(values) for values in each], batch_first=True) for each in (rows, _completion_masks(rows))
    )
    # Padding comes last, so that nothing attends to it.
    right = model(input_ids=ids, labels=ids.masked_fill(mask == 0, -100)).loss
    length = batch["input_ids"].shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    positions = batch.get("position_ids", torch.arange(length)[None])
    with torch.no_grad():
        wrong = model(
            input_ids=batch["input_ids"],
            labels=batch["labels"],
            position_ids=positions,
            attention_mask=causal,
            use_cache=False,
        ).loss
    loss = trainer.compute_loss(model, dict(batch))
    for name, value in (("measured", loss), ("right", right), ("wrong", wrong)):
        numbers[name] += float(value.detach())
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = zip(torch.autograd.grad(loss, weights), torch.autograd.grad(right, weights), strict=True)
    worst = max(float((measured - expected).abs().max()) for measured, expected in gradients)
    return [f"the gradients of {rows} differ by {worst}"] if worst > 1e-5 else []


def _mistakes_elsewhere(module: ModuleType, batch: Any) -> list[str]:
    """Return what is wrong in evaluation, with another trainer, and where the model cannot take a mask."""
    rows, model = _STEPS[0][0], tiny_attention_model()
    mistakes: list[str] = []
    for attribute in ("training", "sliding_window"):
        if attribute == "training":
            model.eval()
        else:
            # Such a model gets a padded batch.
            model.config.sliding_window = 4
        numbers = dict.fromkeys(("measured", "right", "wrong"), 0.0)
        trainer = _stub(module, model)
        mistakes += _add_measurement(numbers, trainer, rows, batch)
        if abs(numbers["measured"] - numbers["right"]) > 1e-5:
            mistakes.append(f"{attribute}: {numbers}")
    return mistakes


def _mistakes_of_collators(module: ModuleType, collate: Any, batch: Any) -> list[str]:
    """Return what is wrong with the batches of packed rows and in workers, and of collators that are to stay."""
    from transformers import DataCollatorWithFlattening

    model, rows = tiny_attention_model(), _STEPS[0][0]
    positions = [position for row in rows for position in range(len(row))]
    mistakes = _mistakes_of_positions(batch, positions)
    if "padding_free" in getattr(collate, "__dataclass_fields__", {}):
        # 0.19 notes the positions, and later releases the lengths.
        by_lengths = any("seq_lengths" in name for name in dir(collate))
        collate.pad_to_multiple_of = 16
        packed = {
            "input_ids": [token for row in rows for token in row],
            **({"seq_lengths": list(map(len, rows))} if by_lengths else {"position_ids": positions}),
        }
        mistakes += _mistakes_of_positions(collate([packed, packed]), 2 * positions)
        batch_of_trl = inspect.unwrap(type(collate).torch_call)(collate, _examples(collate, rows))
        if "attention_mask" in batch_of_trl and "torch_call" not in vars(collate):
            mistakes.append("workers that are not forked import a class that is not patched")
    for name, settings in {"padded": {"padding_free": False}, "prompts": {"prompts": False}}.items():
        other = _trainer_of_one_row(module, model, dataloader_num_workers=1, **settings).data_collator
        padded_rows = "attention_mask" in other([{"input_ids": row} for row in rows])
        # `sft-eos-masked-when-pad-is-eos` gives the collator another method.
        method = vars(other).get("torch_call") if name == "padded" else None
        is_changed = getattr(method, "func", None) is getattr(type(other), "torch_call", ...)
        if is_changed or isinstance(other, _CompletionsOnly) or padded_rows != (name == "padded"):
            mistakes.append(f"{name}: the collator is {other}")
    own = DataCollatorWithFlattening()
    if _trainer_of_one_row(module, model, data_collator=own, padding_free=False).data_collator is not own:
        mistakes.append("the collator of a user is another one")
    without_workers = _trainer_of_one_row(module, model).data_collator
    if "torch_call" in vars(without_workers):
        mistakes.append("a collator is patched that no worker is given")
    return mistakes


def _mistakes_of_positions(batch: Any, positions: list[int]) -> list[str]:
    padding = [0] * (batch["input_ids"].shape[1] - len(positions))
    expected = [*positions, *padding]
    labelled = (batch["labels"][0] != -100).tolist()
    right = batch["position_ids"].tolist() == [expected] and "attention_mask" not in batch
    if right and not any(label for label, position in zip(labelled, expected, strict=True) if position == 0):
        return []
    return [f"the batch of the positions {positions} is {batch}"]


def _mistakes_of_calls(module: ModuleType, flat: dict[str, Any]) -> list[str]:
    """Return what is wrong with the outputs of a padded batch, and in calls that are to stay as they are."""
    import torch

    model, rows = tiny_attention_model(), _STEPS[0][0]
    ids = flat["input_ids"]
    mistakes: list[str] = []
    seen: list[Any] = []
    messages: list[Any] = []

    def stop(model: Any, args: Any, kwargs: Any) -> None:
        seen.append(kwargs)
        raise StopConstruction

    two_rows = {name: torch.cat([flat[name], flat[name]]) for name in ("input_ids", "labels", "position_ids")}
    calls = {
        "no flattened batches": ({"padding_free": False}, "sdpa", flat),
        "FlashAttention": ({}, "flash_attention_2", flat),
        "an attention mask": ({}, "sdpa", {**flat, "attention_mask": torch.ones_like(ids)}),
        "two rows": ({}, "sdpa", two_rows),
        "positions of all rows": ({}, "sdpa", {**two_rows, "position_ids": flat["position_ids"]}),
        "no positions": ({}, "sdpa", {"input_ids": ids, "labels": flat["labels"]}),
    }
    hook = model.register_forward_pre_hook(stop, with_kwargs=True)
    for name, (attributes, attention, batch) in calls.items():
        trainer = _stub(module, model)
        vars(trainer).update(attributes)
        with shadowed(model.config, "_attn_implementation_internal", attention), suppress(StopConstruction):
            trainer.compute_loss(model, dict(batch))
        changed = [key for key, value in batch.items() if seen[-1].get(key) is not value]
        if changed or "attention_mask" in {*seen[-1]} - {*batch}:
            mistakes.append(f"{name}: the model is given {seen[-1]} instead of {batch}")
    for precision, dtype in {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}.items():
        trainer = _stub(module, model)
        vars(trainer.accelerator).update(native_amp=precision != "no", mixed_precision=precision)
        with suppress(StopConstruction):
            trainer.compute_loss(model, dict(flat))
        # A fixed release needs no mask. Here the first and the last of three sequences fit into one row.
        mask = seen[-1].get("attention_mask")
        if mask is not None and (mask.dtype != dtype or mask.shape != (2, 1, 6, 6)):
            mistakes.append(f"with mixed_precision={precision} the mask is {mask.dtype} {tuple(mask.shape)}")
    is_patched = mask is not None
    hook.remove()
    expected = torch.cat([model(input_ids=torch.tensor([row])).logits for row in rows], dim=1)
    for window in (None, 4):
        model.config.sliding_window = window
        # A copy has not been warned about.
        trainer = copy.copy(_stub(module, model))
        with shadowed(_log, "warning", lambda *args: messages.append(args)):
            outputs = [trainer.compute_loss(model, dict(flat), return_outputs=True)[1].logits for _ in range(2)]
        if not all(logits.shape == expected.shape for logits in outputs):
            mistakes.append(f"sliding_window={window}: the logits are {outputs}")
        elif not torch.allclose(outputs[0], expected, atol=1e-5):
            mistakes.append(f"sliding_window={window}: the logits are those of other sequences")
        if len(messages) != (is_patched and window is not None):
            mistakes.append(f"sliding_window={window}: {messages} is said")
    # Liger's loss has no logits, and prompt tuning has some for its virtual tokens.
    trainer.args.use_liger_kernel = True
    for logits in (None, expected.new_zeros(3, 9, 2)):
        hook = model.register_forward_hook(lambda model, args, outputs, logits=logits: _with_logits(outputs, logits))
        measured = trainer.compute_loss(model, dict(flat), return_outputs=True)[1].logits
        hook.remove()
        if measured is not logits:
            mistakes.append(f"the logits {logits} become {measured}")
    return mistakes


def _with_logits(outputs: Any, logits: Any) -> Any:
    """Give the outputs these logits, and the accuracy that TRL expects of Liger's."""
    import torch

    outputs.logits, outputs.token_accuracy = logits, torch.ones(())
    return outputs


class _Log(dict):  # type: ignore[type-arg]
    """Accepts ``[mode][name].append`` and, as some releases call it, ``[name].append``."""

    def __missing__(self, key: str) -> Any:
        return _Log()

    def append(self, value: float) -> None: ...
