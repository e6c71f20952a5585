"""Train one step of a tiny Mixtral with the real DPOTrainer, with all weights and with LoRA."""

from __future__ import annotations

from trl_hotfix.model import Outcome

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    full = tiny.one_step_of_moe_dpo()
    if tiny.variant:
        # With an adapter and compiled, these releases find neither the adapter nor a reference (up to 1.15.0).
        return full
    lora = tiny.one_step_of_moe_dpo(adapter=True)
    if full.outcome.verdict is not lora.outcome.verdict:
        raise AssertionError(f"full {full.outcome}, LoRA {lora.outcome}")
    numbers = {"full": full.outcome.to_dict(), "lora": lora.outcome.to_dict()}
    gradients = {**full.gradients, **{f"lora.{name}": gradient for name, gradient in lora.gradients.items()}}
    return tiny.TrainingResult(Outcome(full.outcome.verdict, numbers), full.loss + lora.loss, gradients)
