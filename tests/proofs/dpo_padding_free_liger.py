"""The proof: one step of the real DPOTrainer with the Liger loss and padding_free, and an evaluation, against padding.

Liger is an optional package that the stacks lack. Its place is taken by the formula that it fuses, on the rows that
it would take for the chosen and for the rejected ones.
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

        own = run()
        before = trl.DPOTrainer.__init__

        @functools.wraps(before)
        def with_liger(self, *args, **kwargs):
            before(self, *args, **kwargs)
            # One name in older releases, the other in newer ones.
            self.args.use_liger_loss = self.args.use_liger_kernel = True
            self.dpo_loss_fn = functools.partial(fused, rows, self.beta)

        trl.DPOTrainer.__init__ = with_liger
        try:
            padded = run()
            assert abs(padded.loss - own.loss) < 1e-6
            free = run(padding_free=True)
        finally:
            trl.DPOTrainer.__init__ = before
    outcome = judge(rows[0], right=4, wrong=1)
    if trl_hotfix.status()[ID].state.value == "applied":
        assert padded.difference(free) < 1e-6
    else:
        assert math.isnan(free.loss)
    return tiny.TrainingResult(outcome, None if math.isnan(free.loss) else free.loss, free.gradients)


def fused(rows: list[int], beta: float, weight: Any, hidden: Any, labels: Any, **reference: Any) -> Any:
    """What ``LigerFusedLinearDPOLoss`` (liger-kernel 0.6.4) returns."""
    import torch

    def log_probs(hidden: Any, weight: Any) -> tuple[Any, Any]:
        logits = hidden @ weight.t()
        counted = labels != -100
        its = logits.log_softmax(-1).gather(-1, labels.masked_fill(~counted, 0)[..., None])[..., 0]
        return (its * counted).sum(-1), logits

    rows.append(len(labels))
    chosen = len(labels) // 2
    policy, logits = log_probs(hidden, weight)
    with torch.no_grad():
        of_reference, _ = log_probs(reference["ref_input"], reference["ref_weight"])
    rewards = beta * (policy - of_reference)
    loss = -torch.nn.functional.logsigmoid(rewards[:chosen] - rewards[chosen:]).mean()
    means = (logits[:chosen].mean(), logits[chosen:].mean())
    rewards = rewards.detach()
    return loss, (policy[:chosen], policy[chosen:], *means, torch.zeros(()), rewards[:chosen], rewards[chosen:])
