"""The proof: one step of a tiny Mixtral, as it is and with LoRA, with the real DPOTrainer."""

from __future__ import annotations

from trl_hotfix.model import Outcome

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    plain = tiny.one_step_of_moe_dpo()
    if tiny.variant:
        # Compiled, with an adapter, these releases find neither the adapter nor a reference (up to 1.15.0).
        return plain
    lora = tiny.one_step_of_moe_dpo(adapter=True)
    if plain.outcome.verdict is not lora.outcome.verdict:
        raise AssertionError(f"full {plain.outcome}, LoRA {lora.outcome}")
    numbers = {"full": plain.outcome.to_dict(), "lora": lora.outcome.to_dict()}
    gradients = {**plain.gradients, **{f"lora.{name}": each for name, each in lora.gradients.items()}}
    return tiny.TrainingResult(Outcome(plain.outcome.verdict, numbers), plain.loss + lora.loss, gradients)
