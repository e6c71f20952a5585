"""What FlashAttention computes, on a CPU: attention that starts anew where the sequences of a flattened batch do.

``varlen_attention`` takes what ``flash_attn.flash_attn_varlen_func`` of flash-attn 2 takes, and gives what it gives, up
to rounding. ``use`` puts it under a model: from transformers 4.48 on through the registries of attention functions and
masks, before that beneath transformers' own class for FlashAttention. A batch stays flattened then, as on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

NAME = "trl_hotfix_flash_reference"
"""The name of the attention function. ``trl_hotfix`` takes a name with ``flash`` in it for FlashAttention."""

FLASH_ATTENTION_2 = "flash_attention_2"
"""The name by which TRL decides whether a batch is given position ids."""

calls: list[int] = []
"""The number of sequences in each call of the kernel beneath a model. A test may clear it."""

kernel: list[Callable[..., Any]] = []
"""What computes in place of ``varlen_attention``, if it has an entry: a kernel with its signature, on a GPU."""


def varlen_attention(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> Any:
    """Return the attention within each sequence of a flattened batch: ``(total_q, heads, head_dim)``.

    ``q`` is ``(total_q, heads, head_dim)``, ``k`` and ``v`` are ``(total_k, heads_k, head_dim)``; ``heads_k`` divides
    ``heads``. ``cu_seqlens_*`` are the int32 sums of the lengths, from 0 to the total. If ``causal``, the mask is
    aligned to the bottom right corner. A query that may attend to nothing has 0. Raises ``ValueError`` for borders that
    do not fit, ``NotImplementedError`` for what no proof needs: dropout, slopes, probabilities, pages.
    """
    import torch

    if dropout_p or alibi_slopes is not None or return_attn_probs or block_table is not None:
        raise NotImplementedError(
            "varlen_attention: dropout, ALiBi, probabilities and block tables are not computed here"
        )
    of_query, place_q, length_q = _sequences(cu_seqlens_q, len(q), max_seqlen_q, "q")
    of_key, place_k, length_k = _sequences(cu_seqlens_k, len(k), max_seqlen_k, "k")
    if len(length_q) != len(length_k):
        raise ValueError(f"varlen_attention: {len(length_q)} sequences of queries and {len(length_k)} of keys")
    # The place of each query among the keys of its sequence: the last query stands at the last key.
    aligned = (place_q + (length_k - length_q)[of_query])[:, None]
    may_attend = of_query[:, None] == of_key[None, :]
    left, right = window_size
    if causal:
        right = 0
    if right >= 0:
        may_attend &= place_k[None, :] <= aligned + right
    if left >= 0:
        may_attend &= place_k[None, :] >= aligned - left
    repeats = q.shape[1] // k.shape[1]
    keys, values = (tensor.repeat_interleave(repeats, dim=1) for tensor in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if softmax_scale is None else softmax_scale
    # The kernel adds up in float32, whatever the dtype of its inputs.
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = torch.einsum("qhd,khd->hqk", q.to(wide), keys.to(wide)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~may_attend, -math.inf)
    nothing = ~may_attend.any(1)
    probabilities = scores.masked_fill(nothing[None, :, None], 0.0).softmax(-1).masked_fill(nothing[None, :, None], 0.0)
    return torch.einsum("hqk,khd->qhd", probabilities, values.to(wide)).to(q.dtype)


def _sequences(cu_seqlens: Any, total: int, longest: int, name: str) -> tuple[Any, Any, Any]:
    """Return the sequence of each token, its place in it, and the lengths of the sequences."""
    import torch

    if cu_seqlens.dim() != 1:
        shape = tuple(cu_seqlens.shape)
        raise ValueError(f"varlen_attention: cu_seqlens_{name} has to be of one dimension, found the shape {shape}")
    lengths = cu_seqlens.diff().long()
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != total or bool((lengths < 0).any()):
        raise ValueError(
            f"varlen_attention: cu_seqlens_{name} has to rise from 0 to {total}, found {cu_seqlens.tolist()}"
        )
    if int(lengths.max()) > longest:
        raise ValueError(
            f"varlen_attention: max_seqlen_{name}={longest}, and a sequence has {int(lengths.max())} tokens"
        )
    sequence = torch.repeat_interleave(torch.arange(len(lengths), device=cu_seqlens.device), lengths)
    return sequence, torch.arange(total, device=cu_seqlens.device) - cu_seqlens[:-1].long()[sequence], lengths


def sequence_borders(position_ids: Any) -> Any:
    """Return the int32 sums of the lengths, ``(sequences + 1,)``: a sequence begins where a position is 0."""
    import torch

    flat = position_ids.reshape(-1)
    return torch.cat([(flat == 0).nonzero()[:, 0], flat.new_tensor([len(flat)])]).to(torch.int32)


def attention_forward(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Any, None]:
    """Attend as transformers' ``flash_attention_forward`` does, with ``varlen_attention`` in place of the kernel.

    ``query``, ``key`` and ``value`` are ``(rows, heads, length, head_dim)``, what is returned is
    ``(rows, length, heads, head_dim)``. Padding in the mask is taken out first; without any, the borders are
    ``cu_seq_lens_q`` and ``cu_seq_lens_k``, or come from ``position_ids`` that start anew; otherwise each row
    is a sequence.
    """
    import torch

    rows, _, length, _ = query.shape
    is_token = _tokens(attention_mask, rows, key.shape[2])
    settings = {
        "dropout_p": dropout,
        "softmax_scale": scaling,
        "causal": getattr(module, "is_causal", True),
        "window_size": (sliding_window - 1, 0) if sliding_window else (-1, -1),
        "softcap": softcap or 0.0,
    }
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    if is_token is not None:
        if length != key.shape[2]:
            raise NotImplementedError("attention_forward: generation with padded rows is not computed here")
        lengths = is_token.sum(1)
        borders = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        longest = int(lengths.max())
        flat = _attend(*(tensor[is_token] for tensor in (q, k, v)), borders, borders, longest, longest, **settings)
        return torch.zeros_like(q).index_put((is_token,), flat), None
    borders_q, borders_k = kwargs.get("cu_seq_lens_q"), kwargs.get("cu_seq_lens_k")
    positions = kwargs.get("position_ids")
    if borders_q is None and positions is not None and _starts_anew(positions, rows, length):
        borders_q = borders_k = sequence_borders(positions)
    if borders_q is None:
        borders_q, borders_k = (
            torch.arange(0, rows * size + 1, size, dtype=torch.int32, device=query.device)
            for size in (length, key.shape[2])
        )
    longest_q, longest_k = (int(borders.diff().max()) for borders in (borders_q, borders_k))
    flat = _attend(
        *(tensor.flatten(0, 1) for tensor in (q, k, v)), borders_q, borders_k, longest_q, longest_k, **settings
    )
    return flat.unflatten(0, (rows, length)), None


def _attend(q: Any, k: Any, v: Any, cu_seqlens_q: Any, *args: Any, **kwargs: Any) -> Any:
    """Call the kernel, and note how many sequences it was given."""
    calls.append(len(cu_seqlens_q) - 1)
    return (kernel[0] if kernel else varlen_attention)(q, k, v, cu_seqlens_q, *args, **kwargs)


def _starts_anew(position_ids: Any, rows: int, length: int) -> bool:
    """Return whether these are the positions of one row of several sequences."""
    return rows == 1 and position_ids.shape[-1] == length > 1 and bool((position_ids.diff() != 1).any())


def _tokens(attention_mask: Any, rows: int, length: int) -> Any:
    """Return which places of the keys are tokens, ``(rows, length)``, or None if all are.

    Before transformers 4.53 an attention function of one's own is given the additive mask of sdpa. Its last row says
    what is padding. That of a flattened batch is causal over the whole row, which FlashAttention would not be told.
    """
    if attention_mask is None:
        return None
    if attention_mask.dim() == 4:
        last = attention_mask[:, 0, -1, :length]
        is_token = last == 0 if last.dtype.is_floating_point else last
    else:
        is_token = attention_mask[:, :length] != 0
    is_token = is_token.expand(rows, length)
    return None if bool(is_token.all()) else is_token


def is_registry_public() -> bool:
    """Return whether transformers takes attention functions of others (4.48 and later)."""
    from transformers import modeling_utils

    return hasattr(modeling_utils, "ALL_ATTENTION_FUNCTIONS")


def register(name: str = NAME) -> None:
    """Register the attention, and the mask of FlashAttention, under ``name``, for all models of this process."""
    from transformers import modeling_utils

    interface: Any = getattr(modeling_utils, "AttentionInterface", None)
    if interface is None:
        modeling_utils.ALL_ATTENTION_FUNCTIONS[name] = attention_forward
    else:
        interface.register(name, attention_forward)
    try:
        from transformers.masking_utils import AttentionMaskInterface, flash_attention_mask
    except ImportError:  # transformers before 4.53
        return
    AttentionMaskInterface.register(name, flash_attention_mask)


def use(model: Any, name: str = NAME) -> Any:
    """Return ``model``, a Llama, with this attention in all its layers.

    ``name`` can be that of FlashAttention 2: then TRL and transformers take it for that. transformers before 4.48 knows
    attention by its name only, so ``NAME`` is an error (``ValueError``) there.
    """
    if is_registry_public():
        register(name)
        _set_attention(model.config, name)
        return model
    if name != FLASH_ATTENTION_2:
        raise ValueError(
            f"transformers before 4.48 has no registry of attention: expected {FLASH_ATTENTION_2!r}, found {name!r}"
        )
    from transformers import modeling_flash_attention_utils as utils
    from transformers.models.llama import modeling_llama

    # What transformers imports from flash_attn where that is installed.
    vars(utils).update(
        flash_attn_varlen_func=_attend,
        flash_attn_func=_fixed_length_attention,
        index_first_axis=lambda tensor, indices: tensor[indices],
        pad_input=_pad_input,
        unpad_input=None,
        _flash_supports_window_size=True,
    )
    _set_attention(model.config, name)
    for layer in model.model.layers:
        layer.self_attn.__class__ = modeling_llama.LLAMA_ATTENTION_CLASSES[name]
        # Since flash-attn 2.1 the mask is aligned to the bottom right corner.
        layer.self_attn._flash_attn_uses_top_left_mask = False
    return model


def _set_attention(config: Any, name: str) -> None:
    # The setter of transformers 4.53 and later would ask for the package.
    vars(config)["_attn_implementation_internal"] = name
    assert config._attn_implementation == name


def _fixed_length_attention(q: Any, k: Any, v: Any, dropout_p: float = 0.0, **settings: Any) -> Any:
    """Attend within each row, as ``flash_attn.flash_attn_func`` does: all are ``(rows, length, heads, head_dim)``."""
    import torch

    rows, length = q.shape[:2]
    borders = torch.arange(0, rows * length + 1, length, dtype=torch.int32, device=q.device)
    flat = (tensor.flatten(0, 1) for tensor in (q, k, v))
    return _attend(*flat, borders, borders, length, length, dropout_p=dropout_p, **settings).unflatten(
        0, (rows, length)
    )


def _pad_input(flat: Any, indices: Any, rows: int, length: int) -> Any:
    """Return ``(rows, length, ...)`` with the tokens of ``flat`` at these flat indices and 0 elsewhere."""
    padded = flat.new_zeros(rows * length, *flat.shape[1:]).index_copy(0, indices, flat)
    return padded.unflatten(0, (rows, length))
