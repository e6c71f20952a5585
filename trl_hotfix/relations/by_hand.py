"""The loss of a trainer's own batch by its formula, in float64, with the gradients that it has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

Batch = dict[str, Any]

STEP = 2
"""The step that is computed by hand. At the first one the policy is its own reference."""


class ByHand:
    """Keeps the batch of ``STEP`` and the model as it was, and computes the loss of it by the formula ``name``."""

    def __init__(self, trainer: Any, name: str) -> None:
        self._formula, self._args = FORMULAS[name], trainer.args
        reference = getattr(trainer, "ref_model", None)
        self._reference = None if reference is None else _doubled(trainer.accelerator.unwrap_model(reference))
        self._steps = 0
        compute_loss = trainer.compute_loss

        def keep(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            self._steps += 1
            if self._steps == STEP:
                self._batch = {name: copy.deepcopy(value) for name, value in inputs.items()}
                self._model = _doubled(trainer.accelerator.unwrap_model(model))
            return compute_loss(model, inputs, *args, **kwargs)

        trainer.compute_loss = keep

    def computed(self) -> tuple[float, dict[str, Any]]:
        """Return the loss, and its gradients by name."""
        batch = {name: value.double() if _is_float(value) else value for name, value in self._batch.items()}
        loss = self._formula(self._model, self._reference, batch, self._args)
        loss.backward()
        gradients = {name: weight.grad.float() for name, weight in self._model.named_parameters()}
        return float(loss), gradients


def _doubled(model: Any) -> Any:
    """Return the model in float64 as transformers makes it, without what TRL has put in place of its methods."""
    other = type(model)(copy.deepcopy(model.config)).double()
    other.load_state_dict(model.state_dict())
    return other.eval()


def _is_float(value: Any) -> bool:
    return hasattr(value, "is_floating_point") and bool(value.is_floating_point())


def _log_probs(model: Any, ids: Any, mask: Any) -> Any:
    """Return the log-probability of each token. Each row is computed alone and without padding."""
    import torch

    rows = []
    for row, kept in zip(ids, mask.bool(), strict=True):
        logits = model(input_ids=row[kept][None], use_cache=False).logits[0, :-1]
        places = kept.nonzero().squeeze(-1)[1:]
        found = logits.log_softmax(-1).gather(-1, row[kept][1:, None]).squeeze(-1)
        rows.append(torch.zeros(len(row), dtype=found.dtype).index_put((places,), found))
    return torch.stack(rows)


def _sft(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    counts = batch["labels"] != -100
    # The first token of a row is not predicted.
    counts[:, 0] = False
    mask = batch["attention_mask"] if "attention_mask" in batch else batch["input_ids"] == batch["input_ids"]
    return -(_log_probs(model, batch["input_ids"], mask) * counts).sum() / counts.sum()


def _pairs(batch: Batch) -> tuple[Any, Any, Any]:
    """Return the tokens of chosen and then rejected rows, which are no padding, and which are of an answer."""
    import torch

    if "completion_mask" in batch:
        return batch["input_ids"], batch["attention_mask"], batch["completion_mask"]
    # Before 0.29 a batch has the two sides apart, and from 0.12 on the prompts too, padded on the left.
    sides = []
    width = max(batch[f"{side}_input_ids"].shape[1] for side in ("chosen", "rejected"))
    for side in ("chosen", "rejected"):
        parts = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        ids, mask = (torch.nn.functional.pad(part, (0, width - part.shape[1])) for part in parts)
        if f"{side}_labels" in batch:
            answers = torch.nn.functional.pad(batch[f"{side}_labels"] != -100, (0, width - parts[0].shape[1]))
            sides.append((ids, mask, answers))
            continue
        prompt = batch["prompt_attention_mask"]
        both = torch.cat([batch["prompt_input_ids"], ids], 1), torch.cat([prompt, mask], 1)
        sides.append((*both, torch.cat([torch.zeros_like(prompt), mask], 1)))
    chosen, rejected = sides
    ids, mask, answers = (torch.cat(parts) for parts in zip(chosen, rejected, strict=True))
    return ids, mask, answers


def _dpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    import torch
    from torch.nn.functional import logsigmoid

    ids, mask, answers = _pairs(batch)
    with torch.no_grad():
        expected = _log_probs(reference, ids, mask)
    ratios = (_log_probs(model, ids, mask) - expected) * answers
    kind = args.loss_type if isinstance(args.loss_type, str) else args.loss_type[0]
    if kind == "ipo":
        chosen, rejected = (ratios.sum(1) / answers.sum(1)).chunk(2)
        return ((chosen - rejected - 1 / (2 * args.beta)) ** 2).mean()
    chosen, rejected = ratios.sum(1).chunk(2)
    margins = args.beta * (chosen - rejected)
    return (1 - margins).relu().mean() if kind == "hinge" else -logsigmoid(margins).mean()


def _grpo(model: Any, reference: Any, batch: Batch, args: Any) -> Any:
    import torch

    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    length, counts = batch["completion_ids"].shape[1], batch["completion_mask"]
    log_probs = _log_probs(model, ids, mask)[:, -length:]
    ratio = (log_probs - log_probs.detach()).exp()
    apart = batch["ref_per_token_logps"] - log_probs
    kl = apart.exp() - apart - 1
    if getattr(args, "use_bias_correction_kl", False):
        kl = kl * ratio
    losses = (args.beta * kl - ratio * batch["advantages"][:, None]) * counts
    if args.loss_type == "grpo":
        return (losses.sum(1) / counts.sum(1)).mean()
    places = counts.shape[0] * args.max_completion_length
    return losses.sum() / (places if args.loss_type == "dr_grpo" else counts.sum())


FORMULAS: dict[str, Callable[[Any, Any, Batch, Any], Any]] = {"SFT": _sft, "DPO": _dpo, "GRPO": _grpo}

Formula = Callable[[Any, Any, Batch, Any], Any]


def is_formula(name: str) -> Callable[[Formula], Formula]:
    """Return a decorator that makes a function the formula of this name. The key of an answer has only its own."""

    def known(function: Formula) -> Formula:
        FORMULAS[name] = function
        return function

    return known
