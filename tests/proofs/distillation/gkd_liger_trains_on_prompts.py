"""Train two optimizer steps of two micro-batches with the real GKDTrainer and Liger 0.6.4.

Losses and gradients are compared with the divergence, and up to TRL 1.3 with the cross-entropy beside it, computed
without TRL and Liger: over the labels, divided by their number, and over all positions, divided by the rows.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from typing import Any
from unittest import mock

from trl_hotfix.authoring import absent

import tiny
from tiny import distillation, gkd_steps, grpo_steps, liger
from tiny.gkd_steps import words

ID = "gkd-liger-trains-on-prompts"
OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "Liger's loss takes the decoder out of the model, and the compiled model is not called"}
"""Liger has fixed it: tests/bench/test_liger.py compares its two versions."""

ROWS = [(words(number, 2 + 3 * (number % 3)), words(number + 30, 2 + number % 4)) for number in range(8)]


def train() -> tiny.TrainingResult:
    trainer_class, _ = tiny.classes("GKD")
    if trainer_class is None or not hasattr(sys.modules[trainer_class.__module__], "LigerFusedLinearJSDLoss"):
        return tiny.TrainingResult(absent("GKD has no loss of Liger"))
    runs = {"dataset": run(), "generated": run(generate=distillation.growing_completions(), lmbda=1.0)}
    outcomes = [grpo_steps.judged_steps(steps) for steps in runs.values()]
    if outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    for name, steps in runs.items():
        acted = tiny.acts(ID, target(), steps.trainer)
        assert acted in (None, len(steps.micro_batches)), f"{name}: the wrapper acts in {acted} calls"
    return grpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train without Liger."""
    if tiny.classes("GKD")[0] is None:
        return tiny.TrainingResult(absent("this release has no GKD"))
    steps = gkd_steps.gkd_steps(lambda *batch: {}, ROWS, per_device_train_batch_size=2)
    assert not tiny.acts(ID, target(), steps.trainer)
    return grpo_steps.several_runs({"without Liger": steps}, absent("Liger has no part in the loss"))


def target() -> str:
    return f"{tiny.classes('GKD')[0].__module__}:GKDTrainer.compute_loss"


def run(**settings: Any) -> Any:
    student: list[Any] = []

    def of_labels_or_of_all(batch: Mapping[str, Any], divergence: Any, items: float | None) -> dict[str, Any]:
        labels = batch["labels"][:, 1:]
        counts = labels != -100
        inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
        log_probs = student[0](**inputs, use_cache=False).logits[:, :-1].log_softmax(-1)
        cross_entropy = -log_probs.gather(-1, labels.masked_fill(~counts, 0)[..., None])[..., 0] * counts
        hard, soft = weights_of_liger()
        divides = distillation.divides_by_a_count("GKD") and items is not None
        factor = counts.sum() / items if divides else 1
        return {
            "right": factor * (hard * cross_entropy + soft * divergence * counts).sum() / counts.sum(),
            "wrong": factor * (hard * cross_entropy + soft * divergence).sum() / len(labels),
        }

    # From 0.25 to 1.3 GKD's evaluation with Liger ends in an error.
    with liger.without_kernels(), mock.patch.object(tiny.classes("GKD")[0], "evaluate"):
        return gkd_steps.gkd_steps(
            of_labels_or_of_all,
            ROWS,
            prepare=student.append,
            use_liger_kernel=True,
            per_device_train_batch_size=2,
            **settings,
        )


def weights_of_liger() -> tuple[float, float]:
    """Return the weights of cross-entropy and divergence: both Liger's defaults, until TRL 1.4 sets them."""
    constants = inspect.unwrap(tiny.classes("GKD")[0].__init__).__code__.co_consts
    is_set = any("weight_hard_loss" in names for names in constants if isinstance(names, tuple))
    return (0.0, 1.0) if is_set else (0.5, 0.5)
