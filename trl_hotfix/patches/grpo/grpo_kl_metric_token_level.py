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

import inspect
import math
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

from ...authoring import argument, judge, shadowed
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


def note_the_kl_that_the_loss_has(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Replace the ``kl`` that ``_compute_loss`` logs by the mean over sequences."""
    if instance.loss_type not in _OVER_SEQUENCES or instance.beta == 0.0:
        return wrapped(*args, **kwargs)
    inputs = argument(wrapped, args, kwargs, "inputs")
    before = _kl_counts(instance)
    beta = _Coefficient(instance.beta)
    with shadowed(instance, "beta", beta):
        loss = wrapped(*args, **kwargs)
    mask = inputs["completion_mask"]
    # Tokens that a tool wrote are not trained on: from 0.26.0 on the loss and the metric leave them out.
    mask = mask * inputs["tool_mask"] if "tool_mask" in inputs else mask
    kl_per_sequence = (beta.factor * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)
    mean = instance.accelerator.gather(kl_per_sequence.mean()).mean().item()
    for mode, count in _kl_counts(instance).items():
        if count > before[mode]:
            instance._metrics[mode]["kl"][-1] = mean
    return loss


def kl_metric_is_the_kl_of_the_loss(module: ModuleType) -> Outcome:
    """With advantages of 0 the loss is ``beta`` times the KL divergence. The metric must be that divergence.

    Three micro-batches of training and one of an evaluation are on one of two ranks.
    """
    _check_that_others_are_left_alone(module)
    outcomes = list(_outcomes(module, "grpo"))
    try:
        outcomes += _outcomes(module, "sapo")
    except ValueError as error:
        if "Unknown loss type" not in str(error):
            raise
    if any(outcome.verdict is not outcomes[0].verdict for outcome in outcomes):
        raise AssertionError(f"some metrics are of one kind, and some are of the other: {outcomes}")
    return outcomes[0]


_BETA = 0.5
_LOG_RATIOS = (0.2, 0.4, 0.8, 0.6)
"""Of reference and policy, for each token of a sequence."""

_KL_OF_OTHER_RANK = 0.25
"""For each token on the other rank, which has as many tokens."""


class _Rank:
    """A trainer on one of two ranks, and what its metric can be."""

    def __init__(self, module: ModuleType, kind: str, beta: float = _BETA) -> None:
        import torch

        log_ratio = torch.tensor(_LOG_RATIOS).unsqueeze(1)
        self.log_probs = (torch.sin(torch.arange(32.0)).reshape(4, 8) - 2).requires_grad_()
        self.reference = self.log_probs.detach() + log_ratio
        # Of each token (arXiv:2402.03300, equation 4), and its derivative.
        self.kl, self.slope = torch.exp(log_ratio) - log_ratio - 1, 1 - torch.exp(log_ratio)
        # Later releases multiply the divergence by the ratio, which is 1, unless they are told not to.
        settings: dict[str, Any] = {"loss_type": kind, "beta": beta, "use_bias_correction_kl": False}
        self.trainer = stub_grpo_trainer(module, self.log_probs, self.reference, **settings)
        other = torch.tensor([_KL_OF_OTHER_RANK, 1.0])
        gather = dict.fromkeys(("gather", "gather_for_metrics"), lambda value: torch.stack([value.mean(), other[0]]))
        # From 1.9.0 on the sum of the divergence and the number of tokens are reduced.
        vars(self.trainer.accelerator).update(gather, reduce=lambda sums, reduction: sums + other * sums[1])

    def loss(self, lengths: tuple[int, ...], **inputs: Any) -> tuple[Any, Any]:
        """Compute the loss of sequences of these lengths, and return it with their mask."""
        import torch

        mask = (torch.arange(8) < torch.tensor(lengths).unsqueeze(1)).long()
        shared = {
            "prompt_ids": torch.ones(4, 1, dtype=torch.long),
            "prompt_mask": torch.ones(4, 1, dtype=torch.long),
            "completion_ids": torch.ones_like(mask),
            "advantages": torch.zeros(4),
            "old_per_token_logps": None,
            "ref_per_token_logps": self.reference,
        }
        loss = self.trainer._compute_loss(None, {**shared, "completion_mask": mask, **inputs})
        return loss, mask

    def over_sequences(self, mask: Any) -> float:
        weights = mask / mask.sum(1, keepdim=True).clamp(min=1)
        return float((self.kl * weights).sum(1).mean())

    def over_tokens(self, mask: Any) -> float:
        return float((self.kl * mask).sum() / mask.sum())


def _over_ranks(kl: float) -> float:
    return (kl + _KL_OF_OTHER_RANK) / 2


def _check_that_others_are_left_alone(module: ModuleType) -> None:
    """Assert that another loss keeps its metric, and that without ``beta`` there is none."""
    rank = _Rank(module, "bnpo")
    _, mask = rank.loss((2, 4, 8, 6))
    judge(rank.trainer._metrics["train"]["kl"][-1], right=_over_ranks(rank.over_tokens(mask)), wrong=math.nan)
    without = _Rank(module, "grpo", beta=0.0)
    without.loss((2, 4, 8, 6))
    if any("kl" in metrics for metrics in without.trainer._metrics.values()):
        raise AssertionError(f"a divergence is noted, and there is none: {without.trainer._metrics}")


def _outcomes(module: ModuleType, kind: str) -> Iterator[Outcome]:
    """Judge the metric of each micro-batch, and compare its loss and gradient with the formula."""
    import torch

    rank = _Rank(module, kind)
    # From 0.26.0 on. The tool has written half of the tokens, and all of the second sequence.
    trained = torch.tensor([[1, 0] * 4, [0, 0] * 4, [0, 1] * 4, [1, 1] * 4])
    has_tools = "tool_mask" in inspect.unwrap(module.GRPOTrainer._compute_loss).__code__.co_consts
    expected: dict[str, list[tuple[float, float]]] = {"train": [], "eval": []}
    for global_step, mode, lengths, with_tool in (
        (0, "train", (2, 4, 8, 6), False),
        (0, "eval", (2, 4, 8, 6), False),
        (0, "train", (5, 0, 3, 7), False),
        (1, "train", (2, 4, 8, 6), has_tools),
    ):
        rank.trainer.state.global_step = global_step
        rank.trainer.model.training, rank.trainer.control.should_evaluate = mode == "train", mode == "eval"
        # 0.26 looks at the tools of the trainer, and later releases at the batch.
        rank.trainer.tools = with_tool
        loss, mask = rank.loss(lengths, **({"tool_mask": trained} if with_tool else {}))
        mask = mask * trained if with_tool else mask
        right = rank.over_sequences(mask)
        gradient = _BETA / 4 * rank.slope * mask / mask.sum(1, keepdim=True).clamp(min=1)
        (measured,) = torch.autograd.grad(loss, rank.log_probs)
        if abs(float(loss.detach()) - _BETA * right) > 1e-6 or not torch.allclose(measured, gradient, atol=1e-6):
            raise AssertionError(f"{kind}: the loss {float(loss)} or its gradient is not that of the formula")
        expected[mode].append((right, rank.over_tokens(mask)))
    for mode, means in expected.items():
        for logged, (right, wrong) in zip(rank.trainer._metrics[mode]["kl"], means, strict=True):
            yield judge(logged, right=_over_ranks(right), wrong=_over_ranks(wrong), mode=mode, loss_type=kind)
