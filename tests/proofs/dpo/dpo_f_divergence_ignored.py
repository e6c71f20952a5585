"""Train two steps of two micro-batches with DPOTrainer and another divergence than the reverse KL, and evaluate.

Losses and accumulated gradients are compared with the formulas of Wang et al. 2024 (arXiv:2309.16240), and with that of
the reverse KL. They are not compared with 0.29.0: on the versions of transformers that old releases run on, whether the
gradients of DPO are divided by the micro-batches differs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps

ID = "dpo-f-divergence-ignored"
TARGET = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"
OVERLAYS = ()
PARITY = False

ALPHA = 0.25


def losses(divergence: str) -> dpo_steps.Formula:
    """Return the loss of a divergence (``right``), and that of the reverse KL (``wrong``)."""

    def formula(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        of_policy = tiny.preference_log_probs(policy, batch, differentiable=True)
        of_reference = tiny.preference_log_probs(reference, batch)
        ratios = [ours - theirs for ours, theirs in zip(of_policy, of_reference, strict=True)]
        return {name: loss_of(kind, *ratios) for name, kind in {"right": divergence, "wrong": "reverse_kl"}.items()}

    return formula


def loss_of(divergence: str, chosen: Any, rejected: Any) -> Any:
    """Return the loss of the logs of the ratios of policy and reference."""
    import torch

    derivative = {
        "reverse_kl": lambda log_u: log_u,
        "js_divergence": lambda log_u: log_u - torch.log1p(log_u.exp()),
        "alpha_divergence": lambda log_u: -(-ALPHA * log_u).exp() / ALPHA,
    }[divergence]
    return -torch.nn.functional.logsigmoid(dpo_steps.BETA * (derivative(chosen) - derivative(rejected))).mean()


def run(divergence: Any) -> tiny.FormulaSteps:
    from trl import DPOTrainer

    # From 0.29 on the exponent of the ratio is the coefficient less 1, and before the coefficient with a minus.
    coefficient = ALPHA if hasattr(DPOTrainer, "dpo_loss") else 1 - ALPHA
    settings: dict[str, Any] = {"f_divergence_type": divergence, "f_alpha_divergence_coef": coefficient}
    return dpo_steps.dpo_steps(losses(getattr(divergence, "value", divergence)), **settings)


def divergences() -> dict[str, Any]:
    """Return the members of FDivergenceType, which is gone in 0.29, by their texts."""
    from trl.trainer import dpo_config

    kinds = {name: name for name in ("reverse_kl", "js_divergence", "alpha_divergence")}
    return {kind.value: kind for kind in getattr(dpo_config, "FDivergenceType", ())} or kinds


def train() -> tiny.TrainingResult:
    runs = {name: run(kind) for name, kind in divergences().items() if name != "reverse_kl"}
    outcomes = [dpo_steps.judged_steps(of_kind) for of_kind in runs.values()]
    if outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"of the two divergences, {outcomes}")
    for name, of_kind in runs.items():
        acted = tiny.acts(ID, TARGET, of_kind.trainer)
        assert acted in (None, len(of_kind.micro_batches)), f"the wrapper acts in {acted} calls: {name}"
    return dpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with the reverse KL, and with the texts in releases that compare with them."""
    from importlib.metadata import version

    from packaging.version import Version

    runs = {"reverse_kl": run(divergences()["reverse_kl"])}
    if Version(version("trl")) < Version("0.24.0"):
        runs |= {name: run(name) for name in ("js_divergence", "alpha_divergence")}
    for name, of_kind in runs.items():
        assert not tiny.acts(ID, TARGET, of_kind.trainer), f"the wrapper acts: {name}"
    return dpo_steps.several_runs(runs, absent("the divergence is the text that is compared with, or the reverse KL"))
