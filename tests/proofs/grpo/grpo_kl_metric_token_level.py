"""Train two steps and evaluate with the real GRPOTrainer and a policy that differs from its reference.

Each logged ``kl`` is compared with the mean over sequences, and each gradient with that of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = False

BETA = 0.5


def train() -> tiny.TrainingResult:
    from trl import GRPOConfig

    if not hasattr(GRPOConfig, "loss_type"):
        return tiny.TrainingResult(
            absent("this release has no choice of the loss; its metric is the mean that its loss is")
        )
    kinds = ("grpo", "sapo") if hasattr(GRPOConfig, "sapo_temperature_neg") else ("grpo",)
    runs = {kind: _run(kind, BETA) for kind in kinds}
    outcomes = [outcome for run in runs.values() for outcome in _judged(run)]
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"the metrics are not all of one kind: {outcomes}")
    return grpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with a loss over tokens, which the metric fits, and without a reference."""
    runs = {"tokens": _run("bnpo", BETA), "no reference": _run("grpo", 0.0)}
    for micro_batch in runs["tokens"].micro_batches:
        judge(micro_batch.kl or 0.0, right=micro_batch.expected_kl["wrong"], wrong=0.0)
    if any(micro_batch.kl is not None for micro_batch in runs["no reference"].micro_batches):
        raise AssertionError("a divergence is logged, and there is no reference")
    return grpo_steps.several_runs(runs, absent("the metric is that of the loss, or there is none"))


def _run(kind: str, beta: float) -> tiny.FormulaSteps:
    mean = grpo_steps.over_tokens if kind == "bnpo" else grpo_steps.over_sequences

    def loss(trainer: Any, inputs: Mapping[str, Any], token_loss: Any, mask: Any) -> dict[str, Any]:
        return {"loss": mean(token_loss, mask)}

    def metric(trainer: Any, inputs: Mapping[str, Any], kl: Any, mask: Any) -> dict[str, Any]:
        return {"right": grpo_steps.over_sequences(kl, mask), "wrong": grpo_steps.over_tokens(kl, mask)}

    return grpo_steps.grpo_steps(loss, metric, whole=True, moved=0.1, loss_type=kind, beta=beta)


def _judged(run: tiny.FormulaSteps) -> list[Any]:
    if len(run.gradients) != 2 or [micro_batch.is_training for micro_batch in run.micro_batches].count(False) != 2:
        raise AssertionError(f"expected two steps and an evaluation: {run.micro_batches}")
    for gradients, expected in zip(run.gradients, run.expected, strict=True):
        differences = {name: float((gradients[name] - value).abs().max()) for name, value in expected["loss"].items()}
        if max(differences.values()) > 1e-5:
            raise AssertionError(f"the gradients are not those of the loss: {differences}")
    return [
        judge(micro_batch.kl, **micro_batch.expected_kl, training=micro_batch.is_training)
        for micro_batch in run.micro_batches
    ]
