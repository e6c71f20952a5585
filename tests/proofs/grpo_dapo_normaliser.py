"""Train one optimizer step of two micro-batches, of four that were generated together, with the real GRPOTrainer.

The policy is the one that generated, so the ratio of the probabilities is 1 and a token's loss is -advantage.
"""

from __future__ import annotations

import tempfile

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True

GENERATED, ACCUMULATED = 4, 2


def train() -> tiny.TrainingResult:
    from trl import GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.grpo(
            tiny.measured(GRPOTrainer),
            tiny.llama(folder, seed=0),
            loss_type="dapo",
            beta=0.0,
            steps_per_generation=GENERATED,
            gradient_accumulation_steps=ACCUMULATED,
        )
        try:
            trainer.train()
        except ValueError as error:
            if "Unknown loss type: dapo" not in str(error):
                raise
            return tiny.TrainingResult(absent("this release has no dapo loss"))
    tokens = GENERATED * sum(tiny.COMPLETION_LENGTHS)
    loss, batch = trainer.losses[0], trainer.batches[0]
    token_losses = float((-batch["advantages"].unsqueeze(1) * batch["completion_mask"]).sum())
    outcome = judge(
        loss,
        right=token_losses / (tokens * ACCUMULATED / GENERATED),
        wrong=token_losses / tokens,
        tokens=tokens,
        token_losses=token_losses,
        micro_batches=len(trainer.batches),
    )
    return tiny.TrainingResult(outcome, loss, trainer.step.gradients)
