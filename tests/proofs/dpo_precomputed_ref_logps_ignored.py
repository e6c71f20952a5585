"""Train two steps with the real DPOTrainer without ``ref_model``: both steps must have the same reference."""

from __future__ import annotations

from trl_hotfix.authoring import absent

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    import trl

    if trl.__version__.startswith("0.12."):
        return tiny.TrainingResult(absent("the batch has no reference log-probs (dpo-precomputed-ref-logps-dropped)"))
    return tiny.two_steps_of_precomputed_dpo()[1]
