"""Train two optimizer steps of two micro-batches with the real GRPOTrainer, LoRA in the decoder and checkpointing.

The norm behind the last layer is trained too (modules_to_save), so that the unpatched run does not fail: it trains that
norm alone. The expected gradients are those of the same run without checkpointing: eight adapter matrices and the norm.
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

ID, TARGET = "grpo-peft-no-input-grads", "trl.trainer.grpo_trainer:GRPOTrainer.__init__"
STEPS, MICRO_BATCHES = 2, 2
REENTRANT = {"use_reentrant": True}


class _Run:
    """A run of the real trainer: its first loss, its gradients after each micro-batch, and what it has trained."""

    def __init__(self, checkpointing: dict[str, Any] | None, *, adapter: bool = True) -> None:
        import torch
        from trl import GRPOTrainer

        accumulated: list[dict[str, Any]] = []
        losses: list[float] = []

        class RecordGradients(GRPOTrainer):  # type: ignore[misc, valid-type]
            def training_step(self, model: Any, *args: Any, **kwargs: Any) -> Any:
                loss = super().training_step(model, *args, **kwargs)
                losses.append(float(loss))
                accumulated.append(tiny.gradients_of(self.model))
                return loss

        lora = tiny.lora()
        lora.modules_to_save = ["model.norm"]
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            trainer = tiny.grpo_of_one_length(
                RecordGradients,
                tiny.llama(folder, seed=0),
                lora if adapter else None,
                gradient_checkpointing=checkpointing is not None,
                gradient_checkpointing_kwargs=checkpointing,
                gradient_accumulation_steps=MICRO_BATCHES,
                max_steps=STEPS,
                optim="sgd",
                learning_rate=0.1,
            )
            tiny.set_adapters(trainer.model)
            self.trainable = sum(parameter.requires_grad for parameter in trainer.model.parameters())
            trainer.train()
        if len(losses) != STEPS * MICRO_BATCHES:
            raise AssertionError(f"expected two steps of two micro-batches: {losses}")
        self.loss, self.acted = losses[0], tiny.acts(ID, TARGET, trainer)
        self.gradients = {
            f"{number}.{name}": value for number, values in enumerate(accumulated) for name, value in values.items()
        }


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    expected, run = _Run(None), _Run(REENTRANT)
    reached = [name for name, gradient in run.gradients.items() if gradient.abs().max() > 1e-9]
    trainable = STEPS * MICRO_BATCHES * expected.trainable
    outcome = judge(len(reached), right=trainable, wrong=STEPS * MICRO_BATCHES)
    # Once the adapters are trained the second step of the other run is another one.
    same = reached if len(reached) == trainable else [name for name in reached if name.startswith(("0.", "1."))]
    difference = max(float((run.gradients[name] - expected.gradients[name]).abs().max()) for name in same)
    if len(expected.gradients) != trainable or difference > 1e-6 or abs(run.loss - expected.loss) > 1e-6:
        raise AssertionError(
            f"{len(expected.gradients)} of {trainable} without checkpointing, from which they are {difference} away"
        )
    if expected.acted or run.acted not in (None, 1):
        raise AssertionError(f"the wrapper acts {run.acted} times, and {expected.acted} times without checkpointing")
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without checkpointing, with a checkpoint that is not reentrant, and all weights."""
    runs = {"none": _Run(None), "not reentrant": _Run({"use_reentrant": False}), "full": _Run(REENTRANT, adapter=False)}
    if any(run.acted for run in runs.values()):
        raise AssertionError(f"the wrapper acts: {[name for name, run in runs.items() if run.acted]}")
    gradients = {f"{name}.{key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(absent("the decoder has its gradients"), runs["none"].loss, gradients)
