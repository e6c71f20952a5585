"""The proof: one step of GRPOTrainer with LoRA in the decoder and gradient checkpointing.

The norm behind the last layer is trained too (modules_to_save), so that the unpatched step does not fail: it trains
that norm alone. What is right is the same step without checkpointing: eight adapter matrices and the norm.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {
    "compiled": "A compiled model traces through the checkpoints, so that nothing is missing.",
    "full": "In full fine-tuning the embeddings are trained, and what they put out needs a gradient anyway.",
}


def one_step(checkpointing: bool) -> tuple[float, dict[str, Any], int]:
    """The loss and the gradients of the first step, and how many weights are to be trained."""
    import torch
    from trl import GRPOTrainer

    losses: list[float] = []

    class Measured(GRPOTrainer):
        def compute_loss(self, *args, **kwargs):
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    lora = tiny.lora()
    lora.modules_to_save = ["model.norm"]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = tiny.grpo_of_one_length(
            Measured,
            tiny.llama(folder, seed=0),
            lora,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": True} if checkpointing else None,
        )
        tiny.set_adapters(trainer.model)
        trained = sum(weight.requires_grad for weight in trainer.model.parameters())
        seen = tiny.FirstStep(trainer.model)
        trainer.train()
    return losses[0], seen.gradients, trained


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    plain_loss, plain, trained = one_step(checkpointing=False)
    loss, gradients, _ = one_step(checkpointing=True)
    reached = [name for name, gradient in gradients.items() if gradient.abs().max() > 1e-9]
    off = max(float((gradients[name] - plain[name]).abs().max()) for name in reached)
    if len(plain) != trained or off > 1e-6 or abs(loss - plain_loss) > 1e-6:
        raise AssertionError(f"{len(plain)} of {trained} without checkpointing, from which gradients are {off} away")
    return tiny.TrainingResult(judge(len(reached), right=trained, wrong=1, off=off), loss, gradients)
