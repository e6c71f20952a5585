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
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


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
    if instance not in _warned:
        _warned.add(instance)
        logging.getLogger("trl_hotfix").warning(
            "padding_free=True, but %s would take the whole flattened batch for one sequence. The batches are padded "
            "instead, as with padding_free=False, and so are the results",
            " and ".join(terms),
        )
    with shadowed(instance, "padding_free", False):
        return wrapped(*args, **kwargs)


def terms_count_by_row(module: ModuleType) -> Outcome:
    """Check that IPO's log-prob is a mean over the tokens of one completion (arXiv:2310.12036).

    The model has no attention, and its config declares FlashAttention, which keeps sequences apart. Right is the
    log-prob of the chosen completion divided by its own 3 tokens, wrong is by the 5 of both completions.
    """
    import torch

    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("there is no concatenated_forward: padding_free is switched off in the constructor")
    if "padding_free" not in {field.name for field in fields(module.DPOConfig)}:
        return absent("there is no padding_free")
    prompt, chosen, rejected = [1, 2], [3, 4, 5], [6, 7]
    batch = {
        f"{name}_{field}": torch.tensor([ids if field == "input_ids" else [1] * len(ids)])
        for name, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected))
        for field in ("input_ids", "attention_mask")
    }
    lm = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))
    trainer = dpo_stub(module, padding_free=True, loss_type="ipo")
    # This trainer is no user's, so the wrapper must not warn about it.
    _warned.add(trainer)
    with torch.no_grad():
        measured = float(trainer.concatenated_forward(lm, batch)["chosen_logps"])
        inputs = torch.tensor([prompt[-1], *chosen[:-1]])
        total = float(lm(inputs).logits.log_softmax(-1).gather(1, torch.tensor(chosen)[:, None]).sum())
    return judge(measured, right=total / len(chosen), wrong=total / len(chosen + rejected))
