"""The proof: one step of a tiny Mixtral under a real DeepSpeed engine, with the real DPOTrainer.

Policy and reference have the same weights, so that the DPO loss of the first step is log 2, and what is over is the
auxiliary term.
"""

from __future__ import annotations

import math
import tempfile

from trl_hotfix.authoring import absent, judge

import tiny

COEFFICIENT = 0.5
OVERLAYS = ("deepspeed",)
PARITY = True


def train() -> tiny.Seen:
    from trl import DPOConfig, DPOTrainer

    losses: list[float] = []

    class Measured(tiny.one_group(DPOTrainer)):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
        seen = tiny.FirstStep(policy)
        trainer = tiny.trainer(
            Measured,
            model=policy,
            ref_model=reference,
            args=tiny.config(DPOConfig, max_length=16, max_prompt_length=8, deepspeed=tiny.deepspeed(stage=0)),
            train_dataset=tiny.preferences(),
            tokenizer=tiny.tokenizer(),
        )
        try:
            trainer.train()
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
            return tiny.Seen(absent("DPO fails with every mixture-of-experts model in this release (TRL PR 2039)"))
    aux_loss = float(seen.outputs.aux_loss.detach())
    right = math.log(2) + COEFFICIENT * aux_loss
    outcome = judge(losses[0], right=right, wrong=math.log(2), coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.Seen(outcome, losses[0], seen.gradients)
