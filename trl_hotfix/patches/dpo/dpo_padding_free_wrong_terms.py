"""Terms of the DPO loss that count by row take the one row of ``padding_free=True`` for one sequence.

``concatenated_forward`` brings the log-probs of the flattened batch back to shape ``(2 * batch, length)``, but leaves
its mask, labels and logits at ``(1, sum of the lengths)`` (TRL pull request 2520). So:

- ``loss_type="ipo"`` divides by the mask of the whole row.
- ``rpo_alpha`` and ``loss_type="sft"`` take ``logits[:batch]`` for the chosen completions, which is the whole row.
- ``use_weighting``, ``ld_alpha``, ``use_logits_to_keep`` (``use_num_logits_to_keep`` in 0.14) and ``token_type_ids``
  combine tensors of both shapes.

TRL's own code pads the batch instead, as every release from 0.29.0 on does with any ``padding_free=True``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, argument, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    Pair,
    absent_if_never_flattened,
    dpo_stub,
    forwarded,
    judge_with_gradients,
    pair_batch,
    pair_log_probs,
    pair_micro_batches,
    recorded_warnings,
    tiny_causal_lm,
    weighted_log_probs,
)

_first_warning = Once()


def pad_for_terms_that_count_by_row(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run this forward with padding if its result is used row by row."""
    if not instance.padding_free or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    arguments = instance.args
    # instance.loss_type is a string, or from 0.20 on a list of strings.
    terms = [f"loss_type={name!r}" for name in ("ipo", "sft") if name in instance.loss_type]
    terms += [name for name in ("rpo_alpha", "ld_alpha") if getattr(arguments, name, None) is not None]
    switches = ("use_weighting", "use_logits_to_keep", "use_num_logits_to_keep")
    terms += [name for name in switches if getattr(arguments, name, False)]
    if "token_type_ids" in argument(wrapped, args, kwargs, "batch"):
        terms.append("token_type_ids")
    if not terms:
        return wrapped(*args, **kwargs)
    if _first_warning(instance):
        logging.getLogger("trl_hotfix").warning(
            "padding_free=True, but %s would take the whole flattened batch for one sequence. The batches are padded "
            "instead, as with padding_free=False, and so are the results",
            " and ".join(terms),
        )
    with shadowed(instance, "padding_free", False):
        return wrapped(*args, **kwargs)


def terms_count_by_row(module: ModuleType) -> Outcome:
    """Check that IPO's log-prob is a mean over the tokens of one completion (arXiv:2310.12036), and its gradient.

    The model has no attention, and its config declares FlashAttention, which keeps sequences apart. Right are the
    log-probs of the completions divided by their own tokens, wrong is by those of all completions of the micro-batch.
    """
    import torch

    if absence := absent_if_never_flattened(module):
        return absence
    model = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))

    def formula(pairs: Sequence[Pair]) -> tuple[Any, Any]:
        log_probs = torch.cat(pair_log_probs(model, pairs))
        tokens = torch.tensor([len(pair.chosen) for pair in pairs] + [len(pair.rejected) for pair in pairs])
        return log_probs / tokens, log_probs / tokens.sum()

    trainers = _stub(module, model=model), _stub(module, model=model)
    with recorded_warnings():
        outcome = judge_with_gradients([model.weight], weighted_log_probs(module, model, trainers, formula))
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes_elsewhere(module, model))):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, **attributes: Any) -> Any:
    defaults = {"padding_free": True, "loss_type": "ipo", "label_pad_token_id": -100, "state": SimpleNamespace()}
    return dpo_stub(module, **{**defaults, **attributes})


def _mistakes_elsewhere(module: ModuleType, model: Any) -> Iterator[str]:
    """Say which settings flatten the batch and should not, or the other way round, and what is wrong with warnings."""
    import torch

    batch = pair_batch(module, next(pair_micro_batches()).pairs)
    known = {field.name for field in fields(module.DPOConfig)}
    switches = ("use_weighting", "use_logits_to_keep", "use_num_logits_to_keep")
    settings = {"rpo_alpha": 0.5, "ld_alpha": 0.5, **dict.fromkeys(switches, True)}
    cases: list[dict[str, Any]] = [{name: value} for name, value in settings.items() if name in known]
    cases += [{"loss_type": ["sigmoid", "sft"]}, {"loss_type": "ipo"}]
    for changed in ({"loss_type": ["sigmoid"]}, *cases):
        trainer = _stub(module, **{"loss_type": ["sigmoid"], **changed})
        vars(trainer.args).update(changed)
        with recorded_warnings() as messages:
            flattened = [_is_flattened(trainer, model, batch) for _ in range(2)]
        if flattened != [changed not in cases] * 2 or len(messages) != (changed in cases):
            yield f"with {changed} the batch is flattened: {flattened}; it is said: {messages}"
    with recorded_warnings() as messages:
        trainer = _stub(module, loss_type="sigmoid")
        if _is_flattened(trainer, model, {**batch, "token_type_ids": torch.zeros_like(batch["prompt_input_ids"])}):
            yield "with token_type_ids the batch is flattened"
        messages.clear()
        for setting in ({"padding_free": False}, {"is_encoder_decoder": True}):
            if _is_flattened(_stub(module, **setting), model, batch) or messages:
                yield f"with {setting} the batch is flattened, or it is said: {messages}"


def _is_flattened(trainer: Any, model: Any, batch: dict[str, Any]) -> bool:
    # The labels of an encoder-decoder model are masked in place.
    copied = {name: value.clone() for name, value in batch.items()}
    return len(forwarded(trainer, model, copied)["input_ids"]) == 1
