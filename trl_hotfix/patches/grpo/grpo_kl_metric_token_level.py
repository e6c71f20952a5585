"""With ``loss_type="grpo"`` or ``"sapo"`` the ``kl`` metric is a mean over tokens, and the loss one over sequences.

The loss of the paper (DeepSeekMath, arXiv:2402.03300, equation 3) is a mean over the sequences of the mean over the
tokens of each sequence, and so is its KL term:

    kl = mean_i( sum_t(kl[i, t] * mask[i, t]) / sum_t(mask[i, t]) )        kl, mask: (batch, completion length)

SAPO (arXiv:2511.20347, TRL 0.26.0) clips in another way and has the same mean. TRL pull request 3004 made the metric
the mean over all tokens of the batch in 0.16.0. Since 0.17.0 (pull request 3256) the loss can be that of the paper
again, but the metric has not changed (issue 2995), up to 1.16.0.

The method multiplies the divergence of each token by ``self.beta``. For this one call ``beta`` is therefore a number
that keeps its factor; the metric that the method has logged is then replaced by the mean above. A sequence whose tokens
are all masked counts as 0, as it does in the loss.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import stub_grpo_trainer

_OVER_SEQUENCES = ("grpo", "sapo")
"""The losses that are a mean over sequences."""


class _Coefficient(float):
    """A number that keeps the factor that it was multiplied by."""

    factor: Any = None

    def __mul__(self, other: Any) -> Any:
        self.factor = other
        return float(self) * other


def _kl_counts(trainer: Any) -> dict[str, int]:
    """Return the number of logged values of ``kl`` for each mode.

    The metrics are ``defaultdict(list)``: reading a missing key would create it, and ``log()`` divides by the length of
    each list.
    """
    return {mode: len(metrics.get("kl", ())) for mode, metrics in trainer._metrics.items()}


@wrapper
def note_the_kl_that_the_loss_has(call: Call) -> Any:
    """Replace the ``kl`` that ``_compute_loss`` logs by the mean over sequences."""
    trainer = call.trainer
    if trainer.loss_type not in _OVER_SEQUENCES or trainer.beta == 0.0:
        return call()
    inputs = call["inputs"]
    before = _kl_counts(trainer)
    beta = _Coefficient(trainer.beta)
    with shadowed(trainer, "beta", beta):
        loss = call()
    mask = inputs["completion_mask"]
    # Tokens that a tool wrote are not trained on: from 0.26.0 on the loss and the metric leave them out.
    mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    kl_per_sequence = (beta.factor * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    mean = trainer.accelerator.gather(kl_per_sequence.mean()).mean().item()
    for mode, count in _kl_counts(trainer).items():
        if count > before[mode]:
            trainer._metrics[mode]["kl"][-1] = mean
    return loss


def kl_metric_is_the_kl_of_the_loss(module: ModuleType) -> Outcome:
    """Compare the ``kl`` of a sequence of one token and one of three, whose KL is 0 and e - 2 for each token."""
    import torch

    log_probs = torch.full((2, 3), -2.0)
    reference = log_probs + torch.tensor([[0.0], [1.0]])
    trainer = stub_grpo_trainer(module, log_probs, reference, loss_type="grpo", beta=0.5, use_bias_correction_kl=False)
    inputs = {
        "prompt_ids": torch.ones(2, 1, dtype=torch.long),
        "prompt_mask": torch.ones(2, 1, dtype=torch.long),
        "completion_ids": torch.ones(2, 3, dtype=torch.long),
        "completion_mask": torch.tensor([[1, 0, 0], [1, 1, 1]]),
        "advantages": torch.zeros(2),
        "old_per_token_logps": None,
        "ref_per_token_logps": reference,
    }
    trainer._compute_loss(None, inputs)
    (measured,) = trainer._metrics["train"]["kl"]
    return judge(measured, right=(math.e - 2) / 2, wrong=3 * (math.e - 2) / 4)
