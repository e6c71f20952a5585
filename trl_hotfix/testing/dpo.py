"""Stand-ins for DPO's trainer and the others that compute ``get_batch_loss_metrics``."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from types import ModuleType
from typing import Any

from ..authoring import absent, shadowed
from ..model import Outcome
from .trainers import default_arguments, stub_trainer


def dpo_stub(module: ModuleType, method: str = "DPO", **attributes: Any) -> Any:
    """Return a stub of this module's ``DPOTrainer`` on which ``get_batch_loss_metrics`` runs in any release to 0.28.

    ``method`` names another trainer with such a method (CPO, ORPO, KTO, BCO). The stub is for a text model without PEFT
    and without an auxiliary loss, padded with 0, unless ``attributes`` differ.
    """
    defaults: dict[str, Any] = {
        "aux_loss_enabled": False,
        "is_encoder_decoder": False,
        "is_vision_model": False,
        "is_peft_model": False,
        "padding_value": 0,
        "pad_token_id": 0,
        "use_dpo_data_collator": True,
        "_peft_has_been_casted_to_bf16": False,
    }
    arguments = default_arguments(getattr(module, f"{method}Config"))
    return stub_trainer(getattr(module, f"{method}Trainer"), arguments, **{**defaults, **attributes})


def absent_if_never_flattened(module: ModuleType) -> Outcome | None:
    """Return ``absent`` if this module's ``DPOTrainer`` flattens no batch with ``padding_free``, as 0.14 to 0.28 do."""
    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("there is no concatenated_forward: padding_free is switched off in the constructor")
    if "padding_free" not in {field.name for field in fields(module.DPOConfig)}:
        return absent("there is no padding_free")
    return None


class _Forwarded(Exception):
    """The model was called."""


def forwarded(trainer: Any, model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``concatenated_forward`` passes to ``model`` of this batch. The call ends there."""

    def end(input_ids: Any, **kwargs: Any) -> None:
        raise _Forwarded({"input_ids": input_ids, **kwargs})

    with shadowed(model, "forward", end):
        try:
            trainer.concatenated_forward(model, batch)
        except _Forwarded as call:
            passed: dict[str, Any] = call.args[0]
            return passed
    raise AssertionError("the model was not called")


@dataclass(frozen=True)
class Pair:
    """A prompt with a chosen and a rejected completion, as token ids, and log-probs that a reference gives to them."""

    prompt: list[int]
    chosen: list[int]
    rejected: list[int]
    reference: tuple[float, float]


@dataclass(frozen=True)
class PairMicroBatch:
    """Pairs that go through the trainer together, in training or in evaluation, after ``step`` optimizer steps."""

    step: int
    is_training: bool
    pairs: Sequence[Pair]


def pair_micro_batches() -> Iterator[PairMicroBatch]:
    """Give two micro-batches of each of two steps, and one of the evaluation. Numbers of rows and lengths differ.

    In each the longest prompt has the longest completion: otherwise 0.12 cuts off its last token.
    """
    pairs = (
        Pair([1, 2], [3, 4, 9], [5, 6], (-1.0, -3.0)),
        Pair([8], [9, 3], [4, 1], (-2.5, -0.5)),
        Pair([2, 5, 6], [7], [1, 3, 7, 2], (-0.75, -4.0)),
        Pair([4, 3], [2, 2, 8], [10], (-5.0, -1.25)),
        Pair([9, 1, 4, 2], [6, 10], [3, 5, 5, 1], (-3.5, -2.0)),
    )
    sizes = ((0, True, pairs[:3]), (0, True, pairs[3:]), (1, True, pairs[1:3]), (1, True, pairs[2:]))
    for step, is_training, rows in (*sizes, (2, False, pairs[1:4])):
        yield PairMicroBatch(step, is_training, rows)


def pair_batch(module: ModuleType, pairs: Sequence[Pair]) -> dict[str, Any]:
    """Return the padded batch that this module's ``DPOTrainer`` is given, with the reference's log-probs, to 0.28.

    Up to 0.11 a sequence has the prompt in it, and labels. Later a batch has prompts, padded on the left, and
    completions. The log-probs are there under the name of up to 0.11, and under that of later releases.
    """
    import torch

    def padded(rows: Iterable[Sequence[int]], filler: int = 0, *, left: bool = False) -> Any:
        side = [torch.tensor(row[::-1] if left else row) for row in rows]
        tensor = torch.nn.utils.rnn.pad_sequence(side, batch_first=True, padding_value=filler)
        return tensor.flip(1) if left else tensor

    whole = "label_pad_token_id" in inspect.signature(module.DPOTrainer.concatenated_inputs).parameters
    batch = {"prompt_input_ids": padded([pair.prompt for pair in pairs], left=True)}
    for side in ("chosen", "rejected"):
        completions = [getattr(pair, side) for pair in pairs]
        prompts = [pair.prompt if whole else [] for pair in pairs]
        labels = [[-100] * len(prompt) + row for prompt, row in zip(prompts, completions, strict=True)]
        batch[f"{side}_input_ids"] = padded(prompt + row for prompt, row in zip(prompts, completions, strict=True))
        batch[f"{side}_labels"] = padded(labels, -100)
        for name in (f"reference_{side}_logps", f"ref_{side}_logps"):
            batch[name] = torch.tensor([pair.reference[side == "rejected"] for pair in pairs])
    for name in ("prompt", "chosen", "rejected"):
        batch[f"{name}_attention_mask"] = (batch[f"{name}_input_ids"] > 0).long()
    return batch


def pair_log_probs(model: Any, pairs: Iterable[Pair]) -> tuple[Any, Any]:
    """Return the summed log-probs of chosen and of rejected completions by ``tiny_causal_lm``, each ``(rows,)``."""
    import torch

    def log_prob(prompt: list[int], completion: list[int]) -> Any:
        tokens = torch.tensor([*prompt, *completion])
        log_probs = model.weight[tokens[:-1]].log_softmax(-1).gather(1, tokens[1:, None])
        return log_probs[len(prompt) - 1 :].sum()

    rows = [(log_prob(pair.prompt, pair.chosen), log_prob(pair.prompt, pair.rejected)) for pair in pairs]
    chosen, rejected = (torch.stack(side) for side in zip(*rows, strict=True))
    return chosen, rejected


def pair_loss(beta: float, policy: tuple[Any, Any], reference: tuple[Any, Any]) -> Any:
    """Return the loss of the paper (arXiv:2305.18290, equation 7), which can be differentiated."""
    import torch

    margins = [chosen - rejected for chosen, rejected in (policy, reference)]
    return -torch.nn.functional.logsigmoid(beta * (margins[0] - margins[1])).mean()
