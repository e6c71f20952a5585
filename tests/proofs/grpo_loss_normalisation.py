"""Train one step with the real GRPOTrainer on completions of unequal length."""

from __future__ import annotations

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    return tiny.one_step_of_unequal_lengths(loss_type="grpo", beta=0.1)
