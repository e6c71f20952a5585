"""The proof: one step of GRPOTrainer with a new adapter on a quantised model.

The model is a stand-in that is only marked as quantised, so that the release prepares it as such; its weights are
floats.
"""

from __future__ import annotations

import tempfile

from trl_hotfix.authoring import judge

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {
    "compiled": "Unpatched, the constructor fails before anything is compiled.",
    "full": "What fails is the preparing of an adapter.",
}


def train() -> tiny.TrainingResult:
    import torch
    from trl import GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.quantised(tiny.llama(folder, seed=0))
        torch.manual_seed(0)
        try:
            trainer = tiny.grpo_of_one_length(
                tiny.measured(GRPOTrainer), policy, tiny.lora(), gradient_checkpointing=True, loss_type="grpo"
            )
        except ValueError as error:
            if "can not be both configured" not in str(error):
                raise
            return tiny.TrainingResult(judge(0, right=8, wrong=0, error=f"ValueError: {error}"))
        tiny.set_adapters(trainer.model)
        trainer.train()
    gradients = trainer.step.gradients
    moving = [name for name, gradient in gradients.items() if gradient.abs().max() > 1e-9]
    return tiny.TrainingResult(judge(len(moving), right=8, wrong=0), trainer.losses[0], gradients)
