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

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, WarnOnce, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import Pair, absent_if_never_flattened, dpo_stub, pair_batch, recorded_warnings, tiny_causal_lm

_warn = WarnOnce()


@wrapper
def pad_for_terms_that_count_by_row(call: Call) -> Any:
    """Run this forward with padding if its result is used row by row."""
    trainer = call.trainer
    if not trainer.padding_free or trainer.is_encoder_decoder:
        return call()
    # trainer.loss_type is a string, or from 0.20 on a list of strings.
    terms = [f"loss_type={name!r}" for name in ("ipo", "sft") if name in trainer.loss_type]
    terms += [name for name in ("rpo_alpha", "ld_alpha") if getattr(trainer.args, name, None) is not None]
    switches = ("use_weighting", "use_logits_to_keep", "use_num_logits_to_keep")
    terms += [name for name in switches if getattr(trainer.args, name, False)]
    if "token_type_ids" in call["batch"]:
        terms.append("token_type_ids")
    if not terms:
        return call()
    _warn(
        trainer,
        "padding_free=True, but %s would take the whole flattened batch for one sequence. The batches are padded "
        "instead, as with padding_free=False, and so are the results",
        " and ".join(terms),
    )
    with shadowed(trainer, "padding_free", False):
        return call()


def terms_count_by_row(module: ModuleType) -> Outcome:
    """Differentiate IPO's log-prob of a chosen completion, 3 and 4, by the logit of 4 after 3.

    It is a mean over the tokens of one completion (arXiv:2310.12036). Right is over two, wrong over the rejected one's
    token as well. The model has no attention, and its config declares FlashAttention, which keeps sequences apart.
    """
    import torch

    if absence := absent_if_never_flattened(module):
        return absence
    model = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))
    settings: dict[str, Any] = {
        "padding_free": True,
        "loss_type": "ipo",
        "label_pad_token_id": -100,
        "state": SimpleNamespace(),
    }
    batch = pair_batch(module, [Pair([1, 2], [3, 4], [5], (0.0, 0.0))])
    with recorded_warnings():
        outputs = dpo_stub(module, model=model, **settings).concatenated_forward(model, batch)
    (gradient,) = torch.autograd.grad(outputs["chosen_logps"].sum(), model.weight)
    of_sum = float((1 - model.weight[3].softmax(-1)[4]).detach())
    return judge(float(gradient[3, 4]), right=of_sum / 2, wrong=of_sum / 3)
