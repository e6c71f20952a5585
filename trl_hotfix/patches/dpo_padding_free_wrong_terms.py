"""Terms of the DPO loss that count by row are wrong, or crash, where ``padding_free=True`` has left one row.

``concatenated_forward`` takes the log-probs of the flattened batch apart again, to shape ``(2 * batch, length)``, but
not its mask, labels and logits, which stay at ``(1, sum of the lengths)`` (TRL pull request 2520). So:

- ``loss_type="ipo"`` divides every sequence by the tokens of all completions, not by its own.
- ``rpo_alpha`` and ``loss_type="sft"`` take ``logits[:batch]`` for the chosen completions: that is the whole row, so
  the rejected ones are trained on as well.
- ``use_weighting``, ``ld_alpha``, ``use_logits_to_keep`` (``use_num_logits_to_keep`` in 0.14) and ``token_type_ids``
  combine tensors of both shapes and crash.

FlashAttention does not help. With these settings the batch is padded instead, by TRL's own code, as every release from
0.29.0 on does with any ``padding_free=True``.
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
from ..stubs import dpo_stub, tiny_causal_lm

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def pad_for_terms_that_count_by_row(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run this forward with padding if its result is used row by row."""
    if not instance.padding_free or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    its = instance.args
    # A string, or from 0.20 on a list of them.
    terms = [f"loss_type={name!r}" for name in ("ipo", "sft") if name in instance.loss_type]
    terms += [name for name in ("rpo_alpha", "ld_alpha") if getattr(its, name, None) is not None]
    switches = ("use_weighting", "use_logits_to_keep", "use_num_logits_to_keep")
    terms += [name for name in switches if getattr(its, name, False)]
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
    """IPO's log-prob is a mean over the tokens of one completion (arXiv:2310.12036): over how many is it here?

    The model has no attention, and says that it has FlashAttention, which keeps sequences apart. Right is the log-prob
    of the chosen completion over its own 3 tokens, wrong is over the 5 of both.
    """
    import torch

    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("there is no concatenated_forward: padding_free is switched off in the constructor")
    if "padding_free" not in {each.name for each in fields(module.DPOConfig)}:
        return absent("there is no padding_free")
    prompt, chosen, rejected = [1, 2], [3, 4, 5], [6, 7]
    batch = {
        f"{name}_{what}": torch.tensor([ids if what == "input_ids" else [1] * len(ids)])
        for name, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected))
        for what in ("input_ids", "attention_mask")
    }
    lm = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))
    trainer = dpo_stub(module, padding_free=True, loss_type="ipo")
    _warned.add(trainer)  # nobody's run
    with torch.no_grad():
        measured = float(trainer.concatenated_forward(lm, batch)["chosen_logps"])
        before = torch.tensor([prompt[-1], *chosen[:-1]])
        total = float(lm(before).logits.log_softmax(-1).gather(1, torch.tensor(chosen)[:, None]).sum())
    return judge(measured, right=total / len(chosen), wrong=total / len(chosen + rejected))
