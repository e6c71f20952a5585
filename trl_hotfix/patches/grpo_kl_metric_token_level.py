"""With ``loss_type="grpo"`` the ``kl`` metric is another mean than the one that the loss has in it.

That loss is the one of the paper (DeepSeekMath, arXiv:2402.03300, equation 3), a mean over the sequences of the mean
over the tokens of each; so is its KL term:

    kl = mean_i( sum_t(kl[i, t] * mask[i, t]) / sum_t(mask[i, t]) )        kl, mask: (batch, completion length)

Since 0.17.0 (TRL pull request 3256) the loss can be computed so again, but the metric stayed what pull request 3004
made it in 0.16.0, the mean over all tokens of the batch: long sequences weigh more in it than they do in the loss
(issue 2995). Who tunes ``beta`` by ``kl`` tunes by a number that is not trained on. Still so in 1.16.0.

The divergence of each token is what the method multiplies by ``self.beta``, so for the one call ``beta`` is a number
that keeps what it is multiplied by. The method computes what it always did, and the metric that it has noted is
replaced by the mean above. A sequence whose tokens are all masked out counts as 0, as it does in the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, shadowed
from ..model import Outcome
from ..stubs import stub_grpo_trainer


class _Coefficient(float):
    """A number that keeps what it was multiplied by."""

    factor: Any = None

    def __mul__(self, other: Any) -> Any:
        self.factor = other
        return float(self) * other


def _noted(trainer: Any) -> dict[str, int]:
    """How many values of ``kl`` there are for each mode.

    To ask for a key that is not there would make it: the metrics are ``defaultdict(list)``; ``log()`` divides by the
    length of each list.
    """
    return {mode: len(metrics.get("kl", ())) for mode, metrics in trainer._metrics.items()}


def note_the_kl_that_the_loss_has(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replace the ``kl`` that ``_compute_loss`` notes by the mean over sequences."""
    if instance.loss_type != "grpo" or instance.beta == 0.0:
        return wrapped(*args, **kwargs)
    inputs = argument(wrapped, args, kwargs, "inputs")
    before = _noted(instance)
    beta = _Coefficient(instance.beta)
    with shadowed(instance, "beta", beta):
        loss = wrapped(*args, **kwargs)
    if beta.factor is None:
        return loss
    kl, mask = beta.factor.detach(), inputs["completion_mask"]
    # Tokens that a tool wrote are not trained on; from 0.26.0 on the loss and the metric leave them out.
    mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    of_each = (kl * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    mean = instance.accelerator.gather(of_each.mean()).mean().item()
    for mode, count in _noted(instance).items():
        if count > before[mode]:
            instance._metrics[mode]["kl"][-1] = mean
    return loss


def kl_metric_is_the_kl_of_the_loss(module: ModuleType) -> Outcome:
    """With advantages of 0 the loss is ``beta`` times the KL divergence, and the metric must be that divergence."""
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
    (noted,) = trainer._metrics["train"]["kl"]
    if trainer._metrics["eval"]:
        raise AssertionError(f"a training step noted metrics of an evaluation: {trainer._metrics['eval']}")
    # Of each token, exp(d) - d - 1 with d = reference - policy = length / 10, arXiv:2402.03300, equation 4.
    of_each = torch.exp(0.1 * lengths) - 0.1 * lengths - 1
    right, wrong = float(of_each.mean()), float((of_each * lengths).sum() / lengths.sum())
    if abs(float(loss.detach()) - beta * right) > 1e-6:
        raise AssertionError(f"the loss is {float(loss)}, not the {beta * right} of the paper")
    return judge(noted, right=right, wrong=wrong, loss=float(loss.detach()), gradient=float(policy.grad.abs().sum()))
