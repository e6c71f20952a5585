"""Train two optimizer steps of two micro-batches with the real GRPOTrainer and its default loss, and evaluate.

Losses and accumulated gradients are compared with the paper (arXiv:2402.03300, equation 3): the mean over sequences.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = False

ID, TARGET = "grpo-loss-type-by-normalisation", "trl.trainer.grpo_trainer:GRPOTrainer.__init__"


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    if "loss_type" not in GRPOConfig.__dataclass_fields__:
        return tiny.TrainingResult(absent("there is no choice of the loss"))
    run, acted = _run()
    assert acted in (None, 1), f"the wrapper acts {acted} times"
    result = run.result
    result.outcome = grpo_steps.judged_steps(run)
    return result


def unaffected() -> tiny.TrainingResult:
    """Train with arguments that have the loss type already."""
    run, acted = _run(loss_type="grpo")
    assert not acted, "the wrapper acts where the loss type is set"
    return grpo_steps.several_runs({"grpo": run}, absent("the loss type is set"))


def _run(**settings: Any) -> tuple[tiny.FormulaSteps, int | None]:
    """Return the run, and how often the wrapper has acted."""
    trainers = []

    def formula(trainer: Any, inputs: Mapping[str, Any], token_loss: Any, mask: Any) -> dict[str, Any]:
        trainers.append(trainer)
        return _means(trainer, inputs, token_loss, mask)

    # Without a divergence the mean over the sequences of a group is 0.
    run = grpo_steps.grpo_steps(formula, moved=0.1, beta=0.5, **settings)
    return run, tiny.acts(ID, TARGET, trainers[0])


def _means(trainer: Any, inputs: Mapping[str, Any], token_loss: Any, mask: Any) -> dict[str, Any]:
    """Return the mean over sequences, and the release's own: over the tokens of the micro-batch, or of the step.

    From 0.22.0 on TRL divides by the micro-batches of a step itself; in an evaluation it does so up to 0.27.0.
    """
    from importlib import metadata

    from packaging.version import Version

    # ``trl.__version__`` is "unknown" in 0.22.0.
    release = Version(metadata.version("trl"))
    if release < Version("0.22"):
        return {
            "right": grpo_steps.over_sequences(token_loss, mask),
            "wrong": grpo_steps.over_tokens(token_loss, mask),
        }
    divides = trainer.model.training or release < Version("0.27.1")
    return {
        "right": grpo_steps.over_sequences(token_loss, mask) / (2 if divides else 1),
        "wrong": (token_loss * mask).sum() / inputs["num_items_in_batch"],
    }
