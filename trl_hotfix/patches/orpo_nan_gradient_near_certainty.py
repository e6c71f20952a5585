"""ORPO's gradient is NaN when the model is sure of a completion.

The loss contains the log odds of a completion (arXiv:2403.07691, equations 3 to 7). With x, its mean log-prob per
token, they are ``x - log(1 - exp(x))``. In float32 ``exp(x)`` is 1 from x > -6e-8 on, so the logarithm is -inf and
its derivative inf. For the chosen completion the factor before it, ``sigmoid(-log odds ratio)``, is 0 then, and
0 * inf is NaN. Up to 0.26.2 the dtype is that of the logits; in bfloat16 x > -0.004 is enough.

TRL 0.27.0 (pull request 4763) computes in float32 and uses ``log(-expm1(x))`` near 0. That is right for more values
of x, but has the same NaN where float32 cannot tell ``exp(x)`` from 1: ``torch.where`` passes a gradient of 0 to the
branch that was not taken, whose derivative is inf.

The wrapper replaces an x nearer to 0 than ``-2**-22`` by that number, which changes the value only by rounding. The
gradient passes through as if it were x: as x goes to 0 the two factors cancel, and their product, the odds of the
other completion, is the same at both numbers. Half precision is computed in float32 near 0, as from 0.27.0 on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, replaced_argument
from ..model import Outcome, Verdict
from ..testing import absent_if_reexported, default_arguments, stub_trainer

_LARGEST_LOGP = -(2.0**-22)
"""Above this number ``exp`` may be 1 in float32. It leaves implementations of ``exp`` two units in the last place."""


def keep_away_from_certainty(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``odds_ratio_loss`` with log-probs that are far enough from 0 for their odds to be finite."""
    import torch

    names = ("policy_chosen_logps", "policy_rejected_logps")
    batches = [argument(wrapped, args, kwargs, name) for name in names]
    if any(logps.dtype in (torch.float16, torch.bfloat16) for logps in batches):
        if not any((logps > -2 * torch.finfo(logps.dtype).eps).any() for logps in batches):
            return wrapped(*args, **kwargs)
        batches = [logps.float() for logps in batches]
    for name, logps in zip(names, batches, strict=True):
        # Adding 0 changes nothing, so the shift needs no check that would synchronise with the device.
        shift = torch.where(logps > _LARGEST_LOGP, _LARGEST_LOGP - logps, torch.zeros_like(logps)).detach()
        args, kwargs = replaced_argument(wrapped, args, kwargs, name, logps + shift)
    return wrapped(*args, **kwargs)


def gradient_of_a_sure_model_is_finite(module: ModuleType) -> Outcome:
    """Check the gradients of a chosen completion with a log-prob of -1e-8 and a rejected one with -0.1."""
    import torch

    if reexported := absent_if_reexported(module, module.ORPOTrainer.odds_ratio_loss):
        return reexported
    beta = 0.5
    trainer = stub_trainer(module.ORPOTrainer, default_arguments(module.ORPOConfig), beta=beta)

    def gradients(chosen: float, rejected: float, dtype: Any) -> list[float]:
        leaves = [torch.tensor([logp], dtype=dtype, requires_grad=True) for logp in (chosen, rejected)]
        trainer.odds_ratio_loss(*leaves)[0].sum().backward()
        return [float(leaf.grad) for leaf in leaves]

    near_certainty = gradients(-1e-8, -0.1, torch.float32)
    # The limit as the log-prob of the chosen completion goes to 0: the odds of the rejected one.
    right = beta * math.exp(-0.1) / (1 - math.exp(-0.1))
    outcome = judge(
        float(sum(map(math.isfinite, near_certainty))),
        right=2.0,
        wrong=1.0,
        chosen=str(near_certainty[0]),
        formula=right,
    )
    # Up to 0.11.4 log(sigmoid(...)) rounds 1 - sigmoid to multiples of 2**-24.
    if outcome.verdict is Verdict.FIXED and not math.isclose(near_certainty[0], right, rel_tol=2e-2):
        raise AssertionError(f"the gradient is finite and not that of the formula: {outcome}")
    half_precision = gradients(0.0, -0.1, torch.bfloat16)
    if outcome.verdict is Verdict.FIXED and not math.isclose(half_precision[0], right, rel_tol=2e-2):
        raise AssertionError(f"in half precision the gradient is not that of the formula: {half_precision}")
    # Far from certainty every release has the derivative of the formula.
    usual, expected = gradients(-0.5, -1.0, torch.float32), _derivative(-0.5, -1.0, beta)
    if not math.isclose(usual[0], expected, rel_tol=1e-4):
        raise AssertionError(f"the gradient is {usual[0]}, and not {expected}")
    return outcome


def _derivative(chosen: float, rejected: float, beta: float) -> float:
    """Return the derivative of the loss by the log-prob of the chosen completion."""
    chosen_odds, rejected_odds = (math.exp(logp) / (1 - math.exp(logp)) for logp in (chosen, rejected))
    return beta * rejected_odds / (chosen_odds + rejected_odds) / (1 - math.exp(chosen))
