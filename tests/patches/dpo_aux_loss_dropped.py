"""The proof: one step of a tiny Mixtral, as it is and with LoRA, with the real DPOTrainer.

Policy and reference have the same weights, so that the DPO loss of the first step is log 2, and what is over is the
auxiliary term. 1.8.0 takes the coefficient from the arguments only, so it is given there too.
"""

from __future__ import annotations

import math
import tempfile

from trl_hotfix.authoring import judge
from trl_hotfix.model import Outcome

import tiny

COEFFICIENT = 0.5
OVERLAYS = ()
PARITY = True


def train() -> tiny.Seen:
    plain = _train(lora=False)
    if tiny.variant:
        # Compiled, with an adapter, these releases find neither the adapter nor a reference (up to 1.15.0).
        return plain
    lora = _train(lora=True)
    if plain.outcome.verdict is not lora.outcome.verdict:
        raise AssertionError(f"full {plain.outcome}, LoRA {lora.outcome}")
    numbers = {"full": plain.outcome.to_dict(), "lora": lora.outcome.to_dict()}
    gradients = {**plain.gradients, **{f"lora.{name}": each for name, each in lora.gradients.items()}}
    return tiny.Seen(Outcome(plain.outcome.verdict, numbers), plain.loss + lora.loss, gradients)


def _train(*, lora: bool) -> tiny.Seen:
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Measured(DPOTrainer):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        known = {"peft_config": tiny.lora()} if lora else {"ref_model": reference}
        trainer = tiny.trainer(
            Measured,
            model=policy,
            args=tiny.config(DPOConfig, max_length=16, max_prompt_length=8, router_aux_loss_coef=COEFFICIENT),
            train_dataset=tiny.preferences(),
            tokenizer=tiny.tokenizer(),
            **known,
        )
        if lora:
            tiny.same_adapter(trainer.model)
        seen = tiny.FirstStep(trainer.model)
        trainer.train()
    aux_loss = float(seen.outputs.aux_loss.detach())
    right = math.log(2) + COEFFICIENT * aux_loss
    outcome = judge(losses[0], right=right, wrong=math.log(2), coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.Seen(outcome, losses[0], seen.gradients)
