"""``tiny.flash`` computes what FlashAttention does: by its signature, a loop over sequences, and padded rows."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tiny import flash  # noqa: E402

attend: Any = flash.attention_forward

REQUIRED = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
SIGNATURE = dict.fromkeys(REQUIRED, inspect.Parameter.empty) | {
    "dropout_p": 0.0,
    "softmax_scale": None,
    "causal": False,
    "window_size": (-1, -1),
    "softcap": 0.0,
    "alibi_slopes": None,
    "deterministic": False,
    "return_attn_probs": False,
    "block_table": None,
}
"""The parameters of ``flash_attn.flash_attn_interface.flash_attn_varlen_func`` of flash-attn 2, with their defaults."""

LENGTHS = (5, 1, 7, 3)


def parameters(function: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def borders(lengths: tuple[int, ...]) -> Any:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def random(*shape: int) -> Any:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def by_loop(q: Any, k: Any, v: Any, lengths_q: Any, lengths_k: Any, causal: bool, window: tuple[int, int]) -> Any:
    """Attend one sequence, one head and one query at a time."""
    outputs = []
    for begin_q, begin_k, length_q, length_k in zip(
        borders(lengths_q).tolist(), borders(lengths_k).tolist(), lengths_q, lengths_k, strict=False
    ):
        for place in range(length_q):
            last = place + length_k - length_q
            first = 0 if window[0] < 0 else max(0, last - window[0])
            end = min(length_k, last + 1) if causal else length_k
            if window[1] >= 0:
                end = min(end, last + window[1] + 1)
            if end <= first:
                outputs.append(torch.zeros_like(q[0]))
                continue
            heads = []
            for head in range(q.shape[1]):
                of_keys = head * k.shape[1] // q.shape[1]
                keys, values = (tensor[begin_k + first : begin_k + end, of_keys] for tensor in (k, v))
                weights = (keys @ q[begin_q + place, head] / math.sqrt(q.shape[2])).softmax(0)
                heads.append(weights @ values)
            outputs.append(torch.stack(heads))
    return torch.stack(outputs)


def test_it_has_the_signature_of_flash_attn() -> None:
    assert parameters(flash.varlen_attention) == SIGNATURE


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="flash-attn is not installed")
def test_it_has_the_signature_of_the_flash_attn_that_is_installed() -> None:
    from flash_attn import flash_attn_varlen_func

    assert parameters(flash.varlen_attention) == parameters(flash_attn_varlen_func)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [(-1, -1), (2, 0), (1, 1), (-1, 2)])
@pytest.mark.parametrize("lengths_k", [LENGTHS, (5, 4, 2, 3)])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2)])
def test_it_is_a_loop_over_sequences(
    causal: bool, window: tuple[int, int], lengths_k: Any, heads: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    q, k, v = random(sum(LENGTHS), heads[0], 8), *(random(sum(lengths_k), heads[1], 8) for _ in range(2))
    measured = flash.varlen_attention(
        q, k, v, borders(LENGTHS), borders(lengths_k), max(LENGTHS), max(lengths_k), causal=causal, window_size=window
    )
    expected = by_loop(q, k, v, LENGTHS, lengths_k, causal, window)
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-12)
    weights = torch.randn_like(expected)
    pairs = (torch.autograd.grad((output * weights).sum(), (q, k, v)) for output in (measured, expected))
    for gradient, expected_gradient in zip(*pairs, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("cu_seqlens", "longest", "message"),
    [
        ([0, 4], 4, "has to rise from 0 to 5"),
        ([1, 5], 4, "has to rise"),
        ([0, 3, 2, 5], 3, "rise"),
        ([0, 5], 4, "max_seqlen_q=4"),
    ],
)
def test_borders_that_do_not_fit_are_an_error(cu_seqlens: list[int], longest: int, message: str) -> None:
    q, given = random(5, 2, 4), torch.tensor(cu_seqlens, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        flash.varlen_attention(q, q, q, given, given, longest, longest)


def test_borders_of_two_dimensions_are_an_error() -> None:
    """As for the kernel, which checks their shape. The collator of completions of 0.14 to 0.19 gives such ones."""
    q, given = random(5, 2, 4), torch.tensor([[0, 5]], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"one dimension, found the shape \(1, 2\)"):
        flash.varlen_attention(q, q, q, given, given, 5, 5)


def test_what_no_proof_needs_is_an_error() -> None:
    q = random(5, 2, 4)
    with pytest.raises(NotImplementedError, match="dropout"):
        flash.varlen_attention(q, q, q, borders((5,)), borders((5,)), 5, 5, dropout_p=0.1)


def states() -> Any:
    torch.manual_seed(0)
    return [random(1, 2, sum(LENGTHS), 8) for _ in range(3)]


def test_a_flattened_batch_has_the_values_of_the_padded_one() -> None:
    flat = states()
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    by_positions, _ = attend(None, *flat, None, position_ids=positions)
    sums = {name: borders(LENGTHS) for name in ("cu_seq_lens_q", "cu_seq_lens_k")}
    by_sums, _ = attend(None, *flat, None, **sums)
    mask = torch.arange(max(LENGTHS))[None] < torch.tensor(LENGTHS)[:, None]
    padded: Any = [
        torch.zeros(len(LENGTHS), max(LENGTHS), 2, 8, dtype=torch.float64)
        .index_put((mask,), state[0].transpose(0, 1))
        .transpose(1, 2)
        for state in flat
    ]
    causal = torch.full((max(LENGTHS),) * 2, -math.inf, dtype=torch.float64).triu(1)
    additive = causal + torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)[:, None, None]
    of_rows = [attend(None, *padded, given)[0][mask] for given in (mask, mask.long(), additive)]
    one_sequence, _ = attend(None, *flat, None)
    for measured in (by_sums[0], *of_rows):
        torch.testing.assert_close(measured, by_positions[0], rtol=0, atol=1e-12)
    expected = torch.nn.functional.scaled_dot_product_attention(*padded, attn_mask=additive).transpose(1, 2)[mask]
    torch.testing.assert_close(by_positions[0], expected, rtol=0, atol=1e-12)
    assert float((one_sequence - by_positions).detach().abs().max()) > 0.1


def test_rows_without_padding_are_a_sequence_each() -> None:
    torch.manual_seed(0)
    rows: Any = [random(3, 2, 6, 8) for _ in range(3)]
    measured, _ = attend(None, *rows, None, position_ids=torch.arange(6).expand(3, -1))
    expected = torch.nn.functional.scaled_dot_product_attention(*rows, is_causal=True).transpose(1, 2)
    torch.testing.assert_close(measured, expected, rtol=0, atol=1e-12)


def test_the_borders_are_those_of_transformers() -> None:
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    states = torch.zeros(1, sum(LENGTHS), 2, 4)
    prepare = getattr(utils, "_prepare_from_posids", None) or utils.prepare_fa2_from_position_ids
    *_, (of_queries, of_keys), _ = prepare(states, states, states, positions)
    assert flash.sequence_borders(positions).tolist() == of_queries.tolist() == of_keys.tolist()
