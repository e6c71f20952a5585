"""Train one step with the real GRPOTrainer and its default arguments on completions of unequal length."""

from __future__ import annotations

from trl_hotfix.authoring import absent

import tiny

OVERLAYS = ()
PARITY = False


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    if "loss_type" not in GRPOConfig.__dataclass_fields__:
        return tiny.TrainingResult(absent("there is no choice of the loss"))
    return tiny.one_step_of_unequal_lengths()
