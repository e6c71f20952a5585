"""GRPO's ``policy_loss`` is divided by the accumulation once too often with ``loss_type`` dapo, cispo or vespo.

With an entropy bonus ``_compute_loss`` logs the loss without it. These losses are sums that are divided by the tokens
of the whole step (1.16.0 grpo_trainer.py:3174), so the loss of a step is the sum over its micro-batches. The log has
the mean over them. Other losses are means of a micro-batch and logged before they are divided.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import stub_grpo_trainer

_OVER_THE_STEP = ("cispo", "dapo", "vespo")
"""The losses that are divided by the tokens of a step."""


@wrapper
def log_the_loss_of_a_step(call: Call) -> Any:
    """Multiply what ``_compute_loss`` has logged by the micro-batches of the step."""
    trainer = call.trainer
    if trainer.loss_type not in _OVER_THE_STEP or not call.is_training:
        return call()
    before = len(trainer._metrics["train"].get("policy_loss", ()))
    loss = call()
    logged = trainer._metrics["train"].get("policy_loss", [])
    if len(logged) > before and trainer.current_gradient_accumulation_steps != 1:
        logged[-1] *= trainer.current_gradient_accumulation_steps
        call.act()
    return loss


def policy_loss_is_the_loss_of_the_step(module: ModuleType) -> Outcome:
    """Compute half of a step: two of four tokens, whose loss is -1 each. Both halves together have a mean of -1."""
    import torch

    if not hasattr(module.GRPOConfig, "entropy_coef"):
        return absent("this release has no entropy bonus")
    log_probs = torch.full((1, 2), -1.0)
    trainer = stub_grpo_trainer(
        module, log_probs, loss_type="dapo", beta=0.0, steps_per_generation=2, gradient_accumulation_steps=2
    )
    trainer._entropy_bonus_enabled, trainer.use_adaptive_entropy, trainer.entropy_coef = True, False, 0.5
    trainer.current_gradient_accumulation_steps = 2
    trainer.accelerator = SimpleNamespace(
        num_processes=1, gather=lambda value: value, sync_gradients=False, reduce=lambda value, *args, **kwargs: value
    )
    tokens = {
        f"{part}_{what}": torch.ones(1, 2).long() for part in ("prompt", "completion") for what in ("ids", "mask")
    }
    logged = {"advantages": torch.ones(1), "num_items_in_batch": torch.tensor(4)}
    trainer._compute_loss(None, {**tokens, **logged, "old_per_token_logps": None})
    (measured,) = trainer._metrics["train"]["policy_loss"]
    return judge(measured, right=-1.0, wrong=-0.5)
