"""RewardTrainer takes the margins of all pairs of a micro-batch from the rewards of each.

``compute_loss`` subtracts ``inputs["margin"]``, of shape (pairs,), from rewards of shape (pairs, 1) (0.23.1
reward_trainer.py:263). The difference is (pairs, pairs): each pair meets the margin of every other, and the loss is the
mean over all of these. 0.24.0 has rewards of shape (pairs,). The wrapper gives the margins the shape of the rewards.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome


@wrapper
def give_each_pair_its_margin(call: Call) -> Any:
    """Call with margins of shape (pairs, 1)."""
    inputs = call["inputs"]
    margins = inputs.get("margin")
    if margins is None or margins.dim() != 1:
        return call()
    return call.with_(inputs={**inputs, "margin": margins.unsqueeze(-1)})()


def a_pair_has_its_own_margin(module: ModuleType) -> Outcome:
    """Compute the loss of two pairs, whose rewards differ by 1 and 3, with the margins 0 and 2."""
    import torch

    if not hasattr(module, "RewardDataCollatorWithPadding"):
        return absent("rewards have the shape of the margins")
    trainer = object.__new__(module.RewardTrainer)
    trainer.args = SimpleNamespace(center_rewards_coefficient=None)
    trainer.use_reward_data_collator = True

    def rewards(input_ids: Any, **kwargs: Any) -> dict[str, Any]:
        return {"logits": input_ids.float()}

    pairs = {"chosen": torch.tensor([[1], [3]]), "rejected": torch.tensor([[0], [0]])}
    ids = {f"input_ids_{side}": tokens for side, tokens in pairs.items()}
    masks = {f"attention_mask_{side}": torch.ones_like(tokens) for side, tokens in pairs.items()}
    loss = trainer.compute_loss(rewards, {**ids, **masks, "margin": torch.tensor([0.0, 2.0])})
    right = torch.nn.functional.softplus(torch.tensor([-1.0, -1.0])).mean()
    wrong = torch.nn.functional.softplus(torch.tensor([-1.0, 1.0, -3.0, -1.0])).mean()
    return judge(float(loss), right=float(right), wrong=float(wrong))
