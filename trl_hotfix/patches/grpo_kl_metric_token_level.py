"""With ``loss_type="grpo"`` the ``kl`` metric is the mean over tokens, while the loss has the mean over sequences.

The loss of the paper (DeepSeekMath, arXiv:2402.03300, equation 3) is a mean over the sequences of the mean over the
tokens of each sequence, and so is its KL term:

    kl = mean_i( sum_t(kl[i, t] * mask[i, t]) / sum_t(mask[i, t]) )        kl, mask: (batch, completion length)

TRL pull request 3004 made the metric the mean over all tokens of the batch in 0.16.0. Since 0.17.0 (pull request 3256)
the loss can be that of the paper again, but the metric has not changed (issue 2995), up to 1.16.0.

The method multiplies the divergence of each token by ``self.beta``. For this one call ``beta`` is therefore a number
that keeps its factor; the metric that the method has logged is then replaced by the mean above. A sequence whose tokens
are all masked counts as 0, as it does in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, shadowed
from ..model import Outcome
from ..testing import stub_grpo_trainer


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


def note_the_kl_that_the_loss_has(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replace the ``kl`` that ``_compute_loss`` logs by the mean over sequences."""
    if instance.loss_type != "grpo" or instance.beta == 0.0:
        return wrapped(*args, **kwargs)
    inputs = argument(wrapped, args, kwargs, "inputs")
    before = _kl_counts(instance)
    beta = _Coefficient(instance.beta)
    with shadowed(instance, "beta", beta):
        loss = wrapped(*args, **kwargs)
    if beta.factor is None:
        return loss
    kl, mask = beta.factor.detach(), inputs["completion_mask"]
    # Tokens that a tool wrote are not trained on: from 0.26.0 on the loss and the metric leave them out.
    mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    kl_per_sequence = (kl * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    mean = instance.accelerator.gather(kl_per_sequence.mean()).mean().item()
    for mode, count in _kl_counts(instance).items():
        if count > before[mode]:
            instance._metrics[mode]["kl"][-1] = mean
    return loss


def kl_metric_is_the_kl_of_the_loss(module: ModuleType) -> Outcome:
    """With advantages of 0 the loss is ``beta`` times the KL divergence. The metric must be that divergence."""
    import torch

    beta = 0.5
    lengths = torch.tensor([2, 4, 8, 6])
    mask = (torch.arange(8) < lengths.unsqueeze(1)).long()
    policy = (torch.sin(torch.arange(32.0)).reshape(4, 8) - 2).requires_grad_()
    reference = policy.detach() + 0.1 * lengths.unsqueeze(1)
    trainer = stub_grpo_trainer(module, policy, reference, loss_type="grpo", beta=beta)
    inputs = {
        "prompt_ids": torch.ones(4, 1, dtype=torch.long),
        "prompt_mask": torch.ones(4, 1, dtype=torch.long),
        "completion_ids": torch.ones_like(mask),
        "completion_mask": mask,
        "advantages": torch.zeros(4),
        "old_per_token_logps": None,
        "ref_per_token_logps": reference,
    }
    loss = trainer._compute_loss(None, inputs)
    loss.backward()
    (logged_kl,) = trainer._metrics["train"]["kl"]
    if trainer._metrics["eval"]:
        raise AssertionError(f"a training step noted metrics of an evaluation: {trainer._metrics['eval']}")
    # Of each token, exp(d) - d - 1 with d = reference - policy = length / 10, arXiv:2402.03300, equation 4.
    kl_per_sequence = torch.exp(0.1 * lengths) - 0.1 * lengths - 1
    right, wrong = float(kl_per_sequence.mean()), float((kl_per_sequence * lengths).sum() / lengths.sum())
    if abs(float(loss.detach()) - beta * right) > 1e-6:
        raise AssertionError(f"the loss is {float(loss)}, not the {beta * right} of the paper")
    return judge(
        logged_kl, right=right, wrong=wrong, loss=float(loss.detach()), gradient=float(policy.grad.abs().sum())
    )
