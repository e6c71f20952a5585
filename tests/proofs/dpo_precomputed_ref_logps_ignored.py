"""The proof: the second step with the real DPOTrainer and no ``ref_model`` has the reference of the first."""

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
