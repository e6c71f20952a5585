"""DPO does not use the precomputed reference log-probs that are in the batch.

``get_batch_loss_metrics`` uses ``batch["reference_chosen_logps"]`` and ``batch["reference_rejected_logps"]`` only if
also ``args.rpo_alpha is not None``, which has no bearing on them (TRL issue 1962). TRL 0.10.1 uses them if
``self.precompute_ref_log_probs or self.args.rpo_alpha is not None`` (pull request 1961). The method's second forward
pass is that of the reference, so the repair answers it with the two values of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, shadowed
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm


def use_the_reference_of_the_batch(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answer the reference's forward pass with what was precomputed."""
    batch = argument(wrapped, args, kwargs, "batch")
    log_probs = [batch.get(f"reference_{side}_logps") for side in ("chosen", "rejected")]
    if (
        not instance.precompute_ref_log_probs
        or instance.args.rpo_alpha is not None
        or any(value is None for value in log_probs)
    ):
        return wrapped(*args, **kwargs)
    forward = instance.concatenated_forward
    calls = iter((forward,))

    def policy_then_batch(*forward_args: Any, **forward_kwargs: Any) -> Any:
        # The method unpacks five values of a reference and uses the first two.
        policy_forward = next(calls, None)
        if policy_forward is None:
            return (*log_probs, None, None, None)
        return policy_forward(*forward_args, **forward_kwargs)

    with shadowed(instance, "concatenated_forward", policy_then_batch):
        return wrapped(*args, **kwargs)


def precomputed_reference_is_used(module: ModuleType) -> Outcome:
    """Compute the loss of one pair whose precomputed reference log-probs are not the policy's.

    Right is ``-log sigmoid(beta * ((pi_chosen - pi_rejected) - (ref_chosen - ref_rejected)))`` (Rafailov et al. 2023,
    arXiv:2305.18290, equation 7) with the batch's own ``ref``; with the policy as its own reference it is log 2.
    """
    import torch

    reference = {"chosen": -1.0, "rejected": -3.0}
    batch: dict[str, Any] = {
        "prompt_input_ids": torch.tensor([[1, 2]]),
        "prompt_attention_mask": torch.ones(1, 2).long(),
    }
    for side, ids in (("chosen", [[3, 4]]), ("rejected", [[5, 6]])):
        batch[f"{side}_input_ids"] = torch.tensor(ids)
        batch[f"{side}_attention_mask"] = torch.ones(1, 2).long()
        batch[f"{side}_labels"] = torch.tensor(ids)
        # The first name is that of releases up to 0.11, the second that of later ones.
        for name in (f"reference_{side}_logps", f"ref_{side}_logps"):
            batch[name] = torch.tensor([reference[side]])
    model = tiny_causal_lm()
    trainer = dpo_stub(module, model=model, ref_model=None, precompute_ref_log_probs=True)
    loss, metrics = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
    margin = float(metrics["logps/chosen"]) - float(metrics["logps/rejected"])
    margin -= reference["chosen"] - reference["rejected"]
    right = math.log1p(math.exp(-trainer.args.beta * margin))
    return judge(float(loss.detach()), right=right, wrong=math.log(2), policy_minus_reference_margin=margin)
