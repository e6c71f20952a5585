"""DPO with ``truncation_mode="keep_end"`` cuts the same columns off of all sequences, whatever their lengths.

``concatenated_forward`` moves the padding of the batch to the right, and keeps its last ``max_length`` columns (pull
request 2551): ``[:, -max_length:]`` takes the first tokens of a sequence that is short, and leaves it padding. 0.18.0
has the padding on the left while it cuts (pull request 3398).

The masks say which tokens there are, and TRL drops columns without any. So the wrapper takes out of them what is before
the last ``max_length`` tokens of each sequence, and nothing is left to cut. The batch has one prompt for both of its
completions, and the prompt loses more tokens before the longer one: hence the masks are changed in what
``concatenated_inputs`` returns, which has each prompt twice.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    Pair,
    dpo_stub,
    forwarded,
    judge_with_gradients,
    pair_batch,
    pair_micro_batches,
    tiny_causal_lm,
    weighted_log_probs,
)


def cut_each_sequence(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run this forward with the last ``max_length`` tokens of each sequence, if TRL would cut their columns."""
    import torch

    longest = instance.max_length
    # Nothing is cut off of [:, -0:], nor of an encoder-decoder model's sequences.
    if instance.truncation_mode != "keep_end" or not longest or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    batch = argument(wrapped, args, kwargs, "batch")
    sequences = instance.concatenated_inputs(batch, padding_value=instance.padding_value)
    prompts, completions = sequences["prompt_attention_mask"], sequences["completion_attention_mask"]
    mask = torch.cat([prompts, completions], 1)
    lengths = mask.sum(1)
    # Of sequences of one length the columns are the right ones.
    if lengths.max() <= longest or lengths.min() == lengths.max():
        return wrapped(*args, **kwargs)
    tokens_from_here = mask.flip(1).cumsum(1).flip(1)
    kept = mask * (tokens_from_here <= longest)
    names = ("prompt_attention_mask", "completion_attention_mask")
    sequences.update(zip(names, kept.split([prompts.shape[1], completions.shape[1]], 1), strict=True))
    with shadowed(instance, "concatenated_inputs", lambda *args, **kwargs: sequences):
        return wrapped(*args, **kwargs)


_MAX_LENGTH = 5
"""Longer than the completions of ``pair_micro_batches``: a token of each prompt is left."""


def each_sequence_keeps_its_end(module: ModuleType) -> Outcome:
    """Judge the log-probs of pairs of unequal lengths, and their gradients, and then what the model is given.

    Right are those of the last tokens of each sequence, wrong those of the last columns of the batch.
    """
    forward = getattr(module.DPOTrainer, "concatenated_forward", None)
    if forward is None or "truncation_mode" not in inspect.unwrap(forward).__code__.co_names:
        return absent("the forward does not truncate by truncation_mode")
    model = tiny_causal_lm()
    trainers = _stub(module, model=model), _stub(module, model=model)

    def formula(pairs: Sequence[Pair]) -> tuple[Any, Any]:
        return _log_probs(model, pairs, by_column=False), _log_probs(model, pairs, by_column=True)

    outcome = judge_with_gradients([model.weight], weighted_log_probs(module, model, trainers, formula))
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes_in_what_is_forwarded(module, model))):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, **attributes: Any) -> Any:
    defaults = {
        "truncation_mode": "keep_end",
        "max_length": _MAX_LENGTH,
        "label_pad_token_id": -100,
        "state": SimpleNamespace(),
    }
    return dpo_stub(module, **{**defaults, **attributes})


def _sequences(pairs: Sequence[Pair]) -> list[tuple[list[int], list[int]]]:
    """Return prompt and completion of each sequence, those that are chosen before those that are rejected."""
    chosen = [(pair.prompt, pair.chosen) for pair in pairs]
    return chosen + [(pair.prompt, pair.rejected) for pair in pairs]


def _log_probs(model: Any, pairs: Sequence[Pair], *, by_column: bool) -> Any:
    """Return the log-prob of each completion in the last tokens of its sequence, or in the last columns of all."""
    import torch

    sequences = _sequences(pairs)
    width = max(len(prompt) + len(completion) for prompt, completion in sequences) if by_column else 0
    summed = []
    for prompt, completion in sequences:
        padding = [0] * (width - len(prompt) - len(completion))
        tokens = torch.tensor([*prompt, *completion, *padding])[-_MAX_LENGTH:]
        is_completion = torch.tensor([0] * len(prompt) + [1] * len(completion) + padding)[-_MAX_LENGTH:]
        # TRL rolls the labels: the first token of a row is predicted by the last one. It is a prompt's, if it is right.
        log_probs = model.weight[tokens.roll(1)].log_softmax(-1).gather(1, tokens[:, None])[:, 0]
        summed.append((log_probs * is_completion).sum())
    return torch.stack(summed)


def _mistakes_in_what_is_forwarded(module: ModuleType, model: Any) -> Iterator[str]:
    """Say for which settings the model is not given the right tokens, also where completions are cut, or nothing is."""
    import torch

    pairs = next(pair_micro_batches()).pairs
    whole = [prompt + completion for prompt, completion in _sequences(pairs)]
    cases: list[tuple[dict[str, Any], list[list[int]]]] = [
        ({"max_length": length, "padding_free": flattened}, [tokens[-length:] for tokens in whole])
        for length in range(1, 8)
        for flattened in (False, True)
    ]
    cases += [({"max_length": length}, whole) for length in (None, 0)]
    cases.append(({"truncation_mode": "keep_start"}, [tokens[:_MAX_LENGTH] for tokens in whole]))
    cases.append(({"is_encoder_decoder": True}, [pair.prompt for pair in pairs] * 2))
    for settings, expected in cases:
        batch = pair_batch(module, pairs)
        passed = forwarded(_stub(module, **settings), model, batch)
        token_ids = passed["input_ids"]
        is_flattened = settings.get("padding_free") and len(token_ids) == 1
        masks = torch.ones_like(token_ids) if is_flattened else passed["attention_mask"]
        rows = [row[mask.bool()].tolist() for row, mask in zip(token_ids, masks, strict=True)]
        # A patch against contamination may give the model rows.
        expected = [list(itertools.chain.from_iterable(expected))] if is_flattened else expected
        if rows != expected or token_ids.shape[1] != max(map(len, expected)):
            yield f"with {settings} the model is given {token_ids.tolist()}, expected {expected}"
