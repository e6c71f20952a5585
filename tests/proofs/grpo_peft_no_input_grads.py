"""The proof: one step of GRPOTrainer with LoRA in the decoder and gradient checkpointing.

The norm behind the last layer is trained too (modules_to_save), so that the unpatched step does not fail: it trains
that norm alone. The expected result is the same step without checkpointing: eight adapter matrices and the norm.
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
    """Return the loss and the gradients of the first step, and the number of trainable parameters."""
    import torch
    from trl import GRPOTrainer

    recorder = tiny.measured(GRPOTrainer)
    lora = tiny.lora()
    lora.modules_to_save = ["model.norm"]
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        trainer = tiny.grpo_of_one_length(
            recorder,
            tiny.llama(folder, seed=0),
            lora,
            gradient_checkpointing=checkpointing,
            gradient_checkpointing_kwargs={"use_reentrant": True} if checkpointing else None,
        )
        tiny.set_adapters(trainer.model)
        trainable = sum(parameter.requires_grad for parameter in trainer.model.parameters())
        trainer.train()
    return recorder.losses[0], recorder.step.gradients, trainable


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    expected_loss, expected, trainable = one_step(checkpointing=False)
    loss, gradients, _ = one_step(checkpointing=True)
    reached = [name for name, gradient in gradients.items() if gradient.abs().max() > 1e-9]
    difference = max(float((gradients[name] - expected[name]).abs().max()) for name in reached)
    if len(expected) != trainable or difference > 1e-6 or abs(loss - expected_loss) > 1e-6:
        raise AssertionError(
            f"{len(expected)} of {trainable} without checkpointing, from which gradients are {difference} away"
        )
    return tiny.TrainingResult(judge(len(reached), right=trainable, wrong=1, off=difference), loss, gradients)
