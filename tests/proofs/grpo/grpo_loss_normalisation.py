"""Train two steps and evaluate with the real GRPOTrainer on completions of unequal length.

Losses, accumulated gradients and the ``kl`` metric are compared with the paper (arXiv:2402.03300, equation 3).
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not Version("0.15") <= Version(trl.__version__) < Version("0.18"):
        return tiny.TrainingResult(absent("it generates in compute_loss, or has had loss_type since 0.17.0"))
    run = grpo_steps.grpo_steps(_means, _means, moved=0.1, loss_type="grpo", beta=0.5)
    outcome = grpo_steps.judged_steps(run)
    for micro_batch in run.micro_batches:
        # With loss_type the metric is another mean than the loss: grpo-kl-metric-token-level.
        if not hasattr(trl.GRPOConfig, "loss_type"):
            kl = judge(micro_batch.kl or 0.0, **micro_batch.expected_kl)
            if kl.verdict is not outcome.verdict:
                raise AssertionError(f"loss and kl are not of one kind: {outcome}, {kl}")
    result = run.result
    result.outcome = outcome
    return result


def unaffected() -> tiny.TrainingResult:
    """Train on completions of eight tokens each: every token then has the weight of every other.

    The weights are powers of two, so that not even the rounding differs.
    """
    from trl import GRPOTrainer

    with tempfile.TemporaryDirectory() as folder:
        trainer = tiny.grpo_of_one_length(tiny.measured(GRPOTrainer), tiny.llama(folder, seed=0), max_steps=2)
        trainer.train()
    return tiny.TrainingResult(absent("all are equally long"), sum(trainer.losses), trainer.step.gradients)


def _means(trainer: Any, inputs: Mapping[str, Any], values: Any, mask: Any) -> dict[str, Any]:
    return {"right": grpo_steps.over_sequences(values, mask), "wrong": grpo_steps.over_tokens(values, mask)}
