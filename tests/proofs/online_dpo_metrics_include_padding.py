"""The proof: one step of the real OnlineDPOTrainer on completions of unequal length.

The logged entropy is compared with the log-probs of the same completions, computed without TRL. Policy and reference
are the same, so that the loss is log 2, patched or not.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False


def train() -> tiny.TrainingResult:
    return _train(padded=True)


def unaffected() -> tiny.TrainingResult:
    """Train on completions of one length: there is no padding."""
    return _train(padded=False)


def _train(*, padded: bool) -> tiny.TrainingResult:
    import torch

    trainer_class, config_class = tiny.classes("OnlineDPO")
    if not hasattr(trainer_class, "_forward"):
        return tiny.TrainingResult(absent("there is no _forward: all is done in one method"))
    losses: list[float] = []

    class LossRecorder(trainer_class):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            losses.append(float(loss))
            return loss

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[10 + (11 * row + 3 * place) % 50 for place in range(5)] for row in range(len(input_ids))]
        return torch.cat([input_ids, torch.tensor(rows)], dim=1)

    with tempfile.TemporaryDirectory() as folder:
        policy, untrained = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.online_dpo(LossRecorder, config_class, policy)
        if not padded:
            policy.generate = generate
        step = tiny.FirstStep(policy)
        trainer.train()
    if not padded:
        return tiny.TrainingResult(absent("there is no padding"), losses[0], step.gradients)
    (logged,) = (entry for entry in trainer.state.log_history if "objective/entropy" in entry)
    with torch.no_grad():
        entropies = [
            -float(tiny.online_log_probs(untrained, 4, padding=padding).sum(1).mean()) for padding in (False, True)
        ]
    entropy = logged["objective/entropy"]
    outcome = judge(entropy, right=entropies[0], wrong=entropies[1], kl=logged["objective/kl"])
    if not math.isclose(losses[0], math.log(2), rel_tol=1e-6):
        raise AssertionError(f"the loss is {losses[0]}")
    return tiny.TrainingResult(outcome, losses[0], step.gradients)
