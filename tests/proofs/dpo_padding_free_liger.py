"""Train and evaluate the real DPOTrainer with the Liger loss and padding_free, and compare with padding.

Liger is an optional package that the stacks lack. The formula that it fuses replaces it, on the rows that it would take
for the chosen and for the rejected ones.
"""

from __future__ import annotations

import functools
import math
import tempfile
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "dpo-padding-free-liger"

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "TRL's Liger loss asks the model for its decoder: a TypeError with an adapter, patched or not."}


def train() -> tiny.TrainingResult:
    import trl

    methods = ("_compute_loss_liger", "concatenated_forward")
    if not all(hasattr(trl.DPOTrainer, name) for name in methods):
        return tiny.TrainingResult(absent("the Liger loss is given no flattened batch"))
    rows: list[int] = []
    with tempfile.TemporaryDirectory() as folder:

        def run(**settings: Any) -> tiny.DpoRun:
            rows.clear()
            return tiny.dpo_run(*(tiny.llama(folder, seed=seed) for seed in (0, 1)), **settings)

        without_liger = run()
        constructor = trl.DPOTrainer.__init__

        @functools.wraps(constructor)
        def with_liger(self, *args, **kwargs):
            constructor(self, *args, **kwargs)
            # Older and newer releases name this argument differently.
            self.args.use_liger_loss = self.args.use_liger_kernel = True
            self.dpo_loss_fn = functools.partial(fused, rows, self.beta)

        trl.DPOTrainer.__init__ = with_liger
        try:
            padded = run()
            assert abs(padded.loss - without_liger.loss) < 1e-6
            flattened = run(padding_free=True)
        finally:
            trl.DPOTrainer.__init__ = constructor
    outcome = judge(rows[0], right=4, wrong=1)
    if trl_hotfix.status()[ID].state.value == "applied":
        assert padded.difference(flattened) < 1e-6
    else:
        assert math.isnan(flattened.loss)
    loss = None if math.isnan(flattened.loss) else flattened.loss
    return tiny.TrainingResult(outcome, loss, flattened.gradients)


def fused(rows: list[int], beta: float, weight: Any, hidden: Any, labels: Any, **reference: Any) -> Any:
    """Return what ``LigerFusedLinearDPOLoss`` (liger-kernel 0.6.4) returns."""
    import torch

    def log_probs(hidden: Any, weight: Any) -> tuple[Any, Any]:
        logits = hidden @ weight.t()
        mask = labels != -100
        token_log_probs = logits.log_softmax(-1).gather(-1, labels.masked_fill(~mask, 0)[..., None])[..., 0]
        return (token_log_probs * mask).sum(-1), logits

    rows.append(len(labels))
    chosen = len(labels) // 2
    policy, logits = log_probs(hidden, weight)
    with torch.no_grad():
        reference_log_probs, _ = log_probs(reference["ref_input"], reference["ref_weight"])
    rewards = beta * (policy - reference_log_probs)
    loss = -torch.nn.functional.logsigmoid(rewards[:chosen] - rewards[chosen:]).mean()
    means = (logits[:chosen].mean(), logits[chosen:].mean())
    rewards = rewards.detach()
    return loss, (policy[:chosen], policy[chosen:], *means, torch.zeros(()), rewards[:chosen], rewards[chosen:])
