"""Flattened batches: several sequences in one row without padding, told apart by ``position_ids`` that start again."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import sys
import weakref
from collections.abc import Mapping
from typing import Any

MASKABLE = frozenset(
    {
        *("cohere", "gemma", "glm", "glm4", "granite", "helium", "llama", "mistral", "nemotron", "olmo", "olmo2"),
        *("phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "stablelm", "starcoder2"),
    }
)
"""The ``model_type`` of dense decoders with rotary positions that use an additive mask of four dimensions unchanged.

Verified for each of them, eager and sdpa, in transformers 4.46.3 and 4.57.6 where it has the type. Mixtures of experts
do so too, but their load-balancing loss needs a mask of two dimensions. A model that is not listed is right as a padded
batch.
"""

_FLASH_ATTENTION_KEYS = frozenset({"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"})
"""The sizes and sums that FlashAttention is given. They describe the flattened batch, not the padded one."""


def attention_keeps_apart(model: Any) -> str:
    """Return how ``model``, unwrapped, can be kept from attending across the sequences of a flattened batch.

    ``flash``: it does not attend across them, because FlashAttention starts again where the position ids do
    (transformers 4.44 and later). transformers has refused to load such a model where FlashAttention cannot run, so the
    config names the attention that really runs. ``mask``: it needs the mask of ``block_diagonal``. ``pad``: no way is
    known here, so the batch has to be a padded one.
    """
    adapters = (getattr(model, "peft_config", None) or {}).values()
    prompt_learning = any(getattr(adapter, "is_prompt_learning", False) for adapter in adapters)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = getattr(base, "config", None)
    attention = str(getattr(config, "_attn_implementation", None))
    if prompt_learning:
        return "pad"
    if "flash" in attention:
        return "flash"
    windows = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    layers = set(getattr(config, "layer_types", None) or ())
    known = getattr(config, "model_type", None) in MASKABLE and not hasattr(config, "auto_map")
    return (
        "mask" if attention in ("sdpa", "eager") and known and not windows and layers <= {"full_attention"} else "pad"
    )


def sequence_numbers(position_ids: Any) -> Any:
    """Return to which sequence of its row each token belongs, from 0 on: ``(rows, length)``."""
    import torch

    number = (position_ids.diff() != 1).long().cumsum(1)
    return torch.cat([number.new_zeros(len(number), 1), number], dim=1)


def block_diagonal(position_ids: Any, dtype: Any) -> Any:
    """Return the additive mask ``(rows, 1, length, length)`` of rows of several sequences: 0 or ``finfo.min``.

    It is 0 where a token may attend: to itself and to the tokens before it in its own sequence. Padding at position 0
    is a sequence for each token. A boolean mask would be half as large, but each layer would make such a one of it.
    """
    import torch

    number = sequence_numbers(position_ids)
    may_attend = (number[:, :, None] == number[:, None, :]).tril_()
    mask = torch.zeros(may_attend.shape, dtype=dtype, device=position_ids.device)
    return mask.masked_fill_(may_attend.logical_not_(), torch.finfo(dtype).min)[:, None]


def isolated(model: Any, position_ids: Any, dtype: Any) -> Any:
    """Return a view of ``model``, wrapped or not, whose forward keeps the sequences of ``position_ids`` apart.

    ``dtype``: the attention's queries have it, so that no layer has to cast the mask. The mask goes into the call and
    not into the batch, since TRL counts tokens by the ``attention_mask`` of the batch. A hook would do as well, but
    Dynamo does not look again whether it is still the same. The cache is switched off: with a cache, transformers
    treats masks and restarts of the position ids differently.
    """
    import wrapt

    mask = block_diagonal(position_ids, dtype)

    class IsolatedView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return self.__wrapped__(*args, **{**kwargs, "attention_mask": mask, "use_cache": False})

    return IsolatedView(model)


Places = tuple[Any, Any]
"""Of each token of a flattened batch, its row and its column in a batch of rows: two tensors ``(tokens,)``."""


def places_in_rows(position_ids: Any, *, several: bool) -> Places:
    """Return where each token of a flattened batch goes in rows that are as long as the longest sequence.

    ``several``: a row has as many sequences as fit, the longest first (first-fit decreasing), instead of one. Then a
    mask of each row has at most about ``tokens * longest`` elements in all, and not the square of the tokens.
    """
    import torch

    (number,) = sequence_numbers(position_ids)
    lengths: list[int] = torch.bincount(number).tolist()
    longest = max(lengths)
    room: list[int] = []
    begins = [(0, 0)] * len(lengths)
    for sequence in sorted(range(len(lengths)), key=lambda one: -lengths[one]) if several else range(len(lengths)):
        row = next((row for row, space in enumerate(room) if several and space >= lengths[sequence]), len(room))
        if row == len(room):
            room.append(longest)
        begins[sequence] = (row, longest - room[row])
        room[row] -= lengths[sequence]
    row_of, begin_of = torch.tensor(begins, device=number.device).unbind(1)
    first = number.new_tensor([0, *itertools.accumulate(lengths)])
    return row_of[number], begin_of[number] + torch.arange(len(number), device=number.device) - first[number]


def in_rows(batch: Mapping[str, Any], places: Places) -> dict[str, Any]:
    """Return a flattened batch in rows: each value of its tokens from ``(1, tokens)`` to ``(rows, longest)``.

    ``position_ids`` are among them, 0 in the padding. The ``attention_mask`` says which are tokens; what describes the
    flattened batch to FlashAttention is left out.
    """
    import torch

    rows, columns = (int(place.max()) + 1 for place in places)
    position_ids = batch["position_ids"]

    def placed(values: Any, filler: int) -> Any:
        return values.new_full((rows, columns), filler).index_put(places, values[0])

    kept = {key: value for key, value in batch.items() if key not in _FLASH_ATTENTION_KEYS}
    of_tokens = {
        key: placed(value, -100 if key == "labels" else 0)
        for key, value in kept.items()
        if getattr(value, "shape", None) == position_ids.shape
    }
    return {**kept, **of_tokens, "attention_mask": placed(torch.ones_like(position_ids), 0)}


def flattened_again(outputs: Any, places: Places) -> None:
    """Flatten the logits of ``outputs`` in place, from ``(rows, longest, ...)`` to ``(1, tokens, ...)``.

    Evaluation compares them with the labels of the flattened batch.
    """
    rows, columns = (int(place.max()) + 1 for place in places)
    if getattr(outputs, "logits", None) is not None and outputs.logits.shape[:2] == (rows, columns):
        outputs["logits"] = outputs.logits[places][None]


_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The ``layer_types`` without a state. LFM2 and MiniMax have others, and do not say that they are stateful."""


def why_sequences_mix(model: Any, *, no_cache: bool = False) -> str | None:
    """Return why ``model``, unwrapped, would attend across the sequences of a flattened batch, or None.

    The batch has ``position_ids`` that start again with each sequence, and no mask. ``no_cache``: the model is called
    with ``use_cache=False``.
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    if getattr(model, "_is_stateful", False) or not _ATTENTION_LAYERS.issuperset(
        getattr(text, "layer_types", None) or ()
    ):
        return "the model has layers that carry a state from one sequence into the next"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return "PEFT's prompt tuning ignores the position_ids that separate them"
    attention = getattr(text, "_attn_implementation", None) or getattr(config, "_attn_implementation", None)
    if "flash" in str(attention):
        return None if _flash_attention_separates() else "this transformers is older than 4.44"
    if not _mask_separates():
        return f"the model's attention is {attention!r}, which does not separate them with this transformers and torch"
    if not no_cache and getattr(text, "use_cache", True):
        return f"the model's attention is {attention!r}, which does not separate them where the model has a cache"
    return _why_mask_mixes(model)


_reasons: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()


def _why_mask_mixes(model: Any) -> str | None:
    """Return why the mask that the model makes lets sequences mix, or None.

    It is kept for each model, since this is asked at each forward, and a large model has tens of thousands of
    submodules. An adapter that is put on later wraps layers, and makes no mask.
    """
    if model not in _reasons:
        modules = {type(submodule).__module__ for submodule in model.modules()}
        sources = [source for name in modules if hasattr(source := sys.modules.get(name), "create_causal_mask")]
        _reasons[model] = None
        if not sources:
            _reasons[model] = "the model builds its attention mask itself"
        elif not all(_mask_is_given_positions(source) for source in sources):
            _reasons[model] = "the model's attention mask is made without the position_ids that separate them"
    return _reasons[model]


def _flash_attention_separates() -> bool:
    """Return whether transformers passes the ``position_ids`` to FlashAttention. Its pull request 31629 added both."""
    import transformers

    return hasattr(transformers, "DataCollatorWithFlattening")


@functools.cache
def _mask_is_given_positions(source: Any) -> bool:
    """Return whether each call of ``create_causal_mask`` in the module has ``position_ids``, as far as its text says.

    Those of GPT-OSS and OPT have not, nor those of Falcon and Bloom in transformers 5.
    """
    try:
        tree = ast.parse(inspect.getsource(source))
    except (OSError, TypeError, SyntaxError):
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return all(
        any(keyword.arg == "position_ids" for keyword in call.keywords)
        or (any(keyword.arg is None for keyword in call.keywords) and _has_key(function, "position_ids"))
        for function in functions
        for call in ast.walk(function)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "create_causal_mask"
    )


def _has_key(function: ast.AST, name: str) -> bool:
    """Return whether a dictionary in ``function`` has the key ``name``."""
    keys = (key for node in ast.walk(function) if isinstance(node, ast.Dict) for key in node.keys)
    return any(isinstance(key, ast.Constant) and key.value == name for key in keys)


def _mask_separates() -> bool:
    """Return whether the mask that transformers makes for sdpa, eager or flex follows the ``position_ids``."""
    try:
        from transformers import masking_utils
    except ImportError:  # older than 4.53
        return False
    # transformers 5 needs a newer torch anyway, and has no such constant.
    return getattr(masking_utils, "_is_torch_greater_or_equal_than_2_6", True)
