"""The proof: one step of the real GRPOTrainer with its default arguments, on completions of unequal length.

Policy and reference are the same, so the loss of a token is -advantage.
"""

from __future__ import annotations

import tempfile

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False


def train() -> tiny.Seen:
    from trl import GRPOConfig, GRPOTrainer

    if "loss_type" not in GRPOConfig.__dataclass_fields__:
        return tiny.Seen(absent("there is no choice of the loss"))
    steps: list[tuple[float, float, float]] = []

    class Measured(GRPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            of_each, lengths = -inputs["advantages"], inputs["completion_mask"].sum(1)
            per_token = (of_each * lengths).sum() / lengths.sum()
            steps.append((float(loss.detach()), float(of_each.mean()), float(per_token)))
            return loss

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        seen = tiny.FirstStep(policy)
        tiny.grpo(Measured, policy).train()
    loss, right, wrong = steps[0]
    return tiny.Seen(judge(loss, right=right, wrong=wrong), loss, seen.gradients)
