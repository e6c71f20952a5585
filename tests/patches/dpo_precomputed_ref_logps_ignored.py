"""The proof: two steps with the real DPOTrainer and no ``ref_model``.

In the first step policy and reference are equal, in the second they are not, and the loss says with which reference it
was computed. The dataset is one batch, so that the shuffle plays no part.
"""

from __future__ import annotations

import math
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True


def train() -> tiny.Seen:
    import torch
    import trl

    if trl.__version__.startswith("0.12."):
        return tiny.Seen(absent("the batch has no reference log-probs (dpo-precomputed-ref-logps-dropped)"))
    losses: list[float] = []
    references: list[int] = []
    seen: dict[str, Any] = {}

    class Measured(trl.DPOTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            # What is left at the end are the gradients of the last step.
            step.gradients.clear()
            policy, reference = (tiny.preference_log_probs(each, inputs) for each in (model, untouched))
            seen["right"] = tiny.dpo_loss(0.5, policy, reference)
            references.clear()
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen["forwards"] = len(references)
            losses.append(float(result.detach()))
            return result

    with tempfile.TemporaryDirectory() as folder:
        policy, untouched = (tiny.llama(folder, seed=0) for _ in range(2))
        step = tiny.FirstStep(policy)
        policy.register_forward_hook(lambda *_: None if torch.is_grad_enabled() else references.append(1))
        words = tiny.tokenizer()
        # 0.9.6 puts it before every prompt, also where there is none.
        words.bos_token = "<unk>"
        arguments = tiny.config(
            trl.DPOConfig,
            max_steps=2,
            learning_rate=1.0,
            optim="sgd",
            beta=0.5,
            precompute_ref_log_probs=True,
            max_length=16,
            max_prompt_length=8,
        )
        trainer = tiny.trainer(
            Measured,
            model=policy,
            args=arguments,
            train_dataset=tiny.preferences().select(range(2)),
            tokenizer=words,
        )
        trainer.train()
    outcome = judge(losses[1], right=seen["right"], wrong=math.log(2), reference_forwards=seen["forwards"])
    assert seen["forwards"] == (1 if outcome.verdict.value == "reproduced" else 0)
    return tiny.Seen(outcome, losses[1], step.gradients)
