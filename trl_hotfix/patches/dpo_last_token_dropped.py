"""DPO cuts one column too many off of a batch, and with it the last token of the longest sequence.

``concatenated_forward`` moves the padding of the batch to the right, and keeps ``[:, : first_empty_col - 1]``. If no
column is empty, ``first_empty_col`` is one more than there are (pull request 2332).

The cut is in the middle of the method, where nothing can be changed. So before it the mask counts one token more of the
longest sequence, and TRL cuts off that column. It has an empty column more than there was, since the cut is right if
there is none. The token ids stay as they are: fewer of their columns are kept than they have.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, shadowed
from ..model import Outcome, Verdict
from ..testing import Pair, dpo_stub, forwarded, judge_with_gradients, pair_batch, pair_log_probs, tiny_causal_lm


def cut_padding_alone(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run this forward with a mask that counts a token more of the longest sequence, if TRL cuts off its last one."""
    from torch.nn.functional import pad

    if instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    batch = argument(wrapped, args, kwargs, "batch")
    sequences = instance.concatenated_inputs(batch, padding_value=instance.padding_value)
    prompts, completions = sequences["prompt_attention_mask"], sequences["completion_attention_mask"]
    of_completions = completions.sum(1)
    lengths = prompts.sum(1) + of_completions
    if lengths.max() == prompts.shape[1] + completions.shape[1]:
        return wrapped(*args, **kwargs)
    longest = lengths.argmax()
    mask = sequences["completion_attention_mask"] = pad(completions, (0, 1))
    mask[longest, of_completions[longest]] = 1
    with shadowed(instance, "concatenated_inputs", lambda *args, **kwargs: sequences):
        return wrapped(*args, **kwargs)


def longest_sequence_keeps_its_end(module: ModuleType) -> Outcome:
    """Judge the log-probs of pairs whose longest prompt has not the longest completion, and their gradients.

    Right are those of all tokens, wrong those without the last one of each sequence that is as long as the longest.
    """
    inputs = getattr(module.DPOTrainer, "concatenated_inputs", None)
    if inputs is None or "label_pad_token_id" in inspect.signature(inputs).parameters:
        return absent("the forward moves no padding: a batch has whole sequences")
    model = tiny_causal_lm()
    outcome = judge_with_gradients([model.weight], _weighted_log_probs(module, model))
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes_in_what_is_forwarded(module, model))):
        raise AssertionError("; ".join(mistakes))
    return outcome


_CHOSEN_LONGEST = Pair([1, 2], [3, 4, 9, 7], [5, 6], (0.0, 0.0))
_REJECTED_LONGEST = Pair([8], [9, 3], [4, 1, 10, 2, 6], (0.0, 0.0))
_LONG_PROMPT = Pair([2, 5, 6], [7], [1, 3], (0.0, 0.0))
_LONGEST_OF_BOTH = Pair([9, 1, 4, 2], [6, 10], [3, 5, 5, 1, 2], (0.0, 0.0))

_CUT = (
    # Training, two steps of two micro-batches, and the evaluation.
    (True, (_CHOSEN_LONGEST, _LONG_PROMPT)),
    (True, (_LONG_PROMPT, _REJECTED_LONGEST, _CHOSEN_LONGEST)),
    (True, (_REJECTED_LONGEST, _LONG_PROMPT)),
    (True, (_REJECTED_LONGEST, _CHOSEN_LONGEST)),
    (False, (_LONG_PROMPT, _CHOSEN_LONGEST)),
)
_WHOLE = ((_LONGEST_OF_BOTH, _CHOSEN_LONGEST), (_CHOSEN_LONGEST,), (_LONG_PROMPT, _LONGEST_OF_BOTH))


def _stub(module: ModuleType, *, max_length: int | None = None, **attributes: Any) -> Any:
    defaults = {"label_pad_token_id": -100, "state": SimpleNamespace(), "truncation_mode": "keep_start"}
    trainer = dpo_stub(module, **{**defaults, "max_length": max_length, **attributes})
    trainer.args.max_length = max_length
    return trainer


def _sequences(pairs: Sequence[Pair]) -> list[list[int]]:
    """Return the tokens of each sequence, those that are chosen before those that are rejected."""
    return [pair.prompt + pair.chosen for pair in pairs] + [pair.prompt + pair.rejected for pair in pairs]


def _weighted_log_probs(module: ModuleType, model: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Give of each micro-batch a sum of log-probs: measured, right and wrong. Each row has a weight of its own."""
    import torch

    trainers = {is_training: _stub(module, model=model) for is_training in (True, False)}
    for is_training, pairs in _CUT:
        model.train(is_training)
        outputs = trainers[is_training].concatenated_forward(model, pair_batch(module, pairs))
        measured = torch.cat([outputs["chosen_logps"], outputs["rejected_logps"]])
        right = torch.cat(pair_log_probs(model, pairs))
        sequences = _sequences(pairs)
        longest = max(map(len, sequences))
        ends = [model.weight[row[-2]].log_softmax(-1)[row[-1]] * (len(row) == longest) for row in sequences]
        weights = torch.arange(1, 1 + len(measured))
        yield (measured * weights).sum(), (right * weights).sum(), ((right - torch.stack(ends)) * weights).sum()


def _mistakes_in_what_is_forwarded(module: ModuleType, model: Any) -> Iterator[str]:
    """Say for which batches and settings the model is not given the tokens of each sequence, and padding behind them.

    An encoder-decoder model is given prompts and labels.
    """
    of_all = [*(pairs for _, pairs in _CUT), *_WHOLE]
    for pairs in of_all:
        whole = _sequences(pairs)
        longest = max(map(len, whole))
        for max_length in (None, longest - 1, longest, longest + 1):
            passed = forwarded(_stub(module, max_length=max_length), model, pair_batch(module, pairs))
            rows = [row[mask.bool()].tolist() for row, mask in _rows(passed)]
            expected = [tokens[:max_length] for tokens in whole]
            if rows != expected or passed["input_ids"].shape[1] != max(map(len, expected)):
                yield f"with max_length={max_length} the model is given {rows}, expected {expected}"
    batch = pair_batch(module, _CUT[0][1])
    labels = forwarded(_stub(module, is_encoder_decoder=True), model, batch).get("labels")
    if labels is not None and labels.shape[1] != 4:
        yield f"an encoder-decoder model is given the labels {labels.tolist()}"


def _rows(passed: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    return zip(passed["input_ids"], passed["attention_mask"], strict=True)
