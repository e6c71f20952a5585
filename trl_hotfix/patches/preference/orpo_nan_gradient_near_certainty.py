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

import inspect
import math
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from ...authoring import argument, judge, replaced_argument
from ...model import Outcome, Verdict
from ...testing import absent_if_reexported, default_arguments, stub_trainer

_LARGEST_LOGP = -(2.0**-22)
"""Above this number ``exp`` may be 1 in float32. It leaves implementations of ``exp`` two units in the last place."""

_BETA = 0.5  # of the self-test
_NAMES = "loss", "gradient of the chosen", "gradient of the rejected"


def keep_away_from_certainty(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``odds_ratio_loss`` with log-probs that are far enough from 0 for their odds to be finite."""
    import torch

    names = ("policy_chosen_logps", "policy_rejected_logps")
    batches = [argument(wrapped, args, kwargs, name) for name in names]
    half = any(logps.dtype in (torch.float16, torch.bfloat16) for logps in batches)
    if half and not any((logps > -2 * torch.finfo(logps.dtype).eps).any() for logps in batches):
        return wrapped(*args, **kwargs)
    for name in names:
        logps = argument(wrapped, args, kwargs, name)
        logps = logps.float() if half else logps
        # Adding 0 changes nothing, so the shift needs no check that would synchronise with the device.
        shift = torch.where(logps > _LARGEST_LOGP, _LARGEST_LOGP - logps, torch.zeros_like(logps)).detach()
        args, kwargs = replaced_argument(wrapped, args, kwargs, name, logps + shift)
    return wrapped(*args, **kwargs)


def gradient_of_a_sure_model_is_finite(module: ModuleType) -> Outcome:
    """Check the gradients of four pairs: a sure chosen completion, a sure rejected one, and two usual pairs.

    Sure is a log-prob that float32 cannot tell from 0. Then half precision, where 0 is nearer.
    """
    import torch

    if reexported := absent_if_reexported(module, module.ORPOTrainer.odds_ratio_loss):
        return reexported
    # What TRL computes itself, also where this patch is on.
    own = inspect.unwrap(module.ORPOTrainer.odds_ratio_loss)
    mistakes: list[str] = []

    def losses(method: Callable[..., Any], chosen: list[float], rejected: list[float], dtype: Any) -> list[Any]:
        """Return the losses and their gradients by the log-probs of both completions."""
        leaves = [torch.tensor(logps, dtype=dtype, requires_grad=True) for logps in (chosen, rejected)]
        result = method(*leaves)[0]
        result.sum().backward()
        return [result.detach(), *(leaf.grad for leaf in leaves)]

    # The last chosen value is near the largest one, so that a shift of another size shows.
    chosen, rejected = [-1e-8, -0.1, -0.5, _LARGEST_LOGP / 2], [-0.1, -1e-8, -1.0, -2.0]
    trainer = _stub(module)
    single = losses(trainer.odds_ratio_loss, chosen, rejected, torch.float32)
    finite = float(single[1][0].isfinite()) + float(single[2][1].isfinite())
    # The limit as the log-prob of the chosen completion goes to 0: the odds of the rejected one.
    right = _BETA * math.exp(-0.1) / (1 - math.exp(-0.1))
    numbers = {"chosen": str(float(single[1][0])), "rejected": str(float(single[2][1])), "formula": right}
    outcome = judge(finite, right=2.0, wrong=0.0, **numbers)
    # Far from certainty every release has the derivative of the formula.
    expected = _derivative(-0.5, -1.0, _BETA)
    if not math.isclose(float(single[1][2]), expected, rel_tol=1e-4):
        mistakes.append(f"the gradient is {float(single[1][2])}, and not {expected}")
    if outcome.verdict is Verdict.FIXED:
        # Up to 0.11.4 log(sigmoid(...)) rounds 1 - sigmoid to multiples of 2**-24.
        if not math.isclose(float(single[1][0]), right, rel_tol=2e-2):
            mistakes.append(f"the gradient is finite and not that of the formula: {outcome}")
        shifted = [[min(logp, _LARGEST_LOGP) for logp in logps] for logps in (chosen, rejected)]
        for dtype in (torch.float32, torch.float64):
            patched = losses(trainer.odds_ratio_loss, chosen, rejected, dtype)
            unpatched = losses(partial(own, trainer), shifted[0], shifted[1], dtype)
            for name, value, expected in zip(_NAMES, patched, unpatched, strict=True):
                if not torch.allclose(value, expected, rtol=1e-5, atol=0):
                    mistakes.append(f"{dtype}, {name}: {value}, and not {expected}")
        mistakes += _mistakes_in_half_precision(_stub(module), own, losses, right)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType) -> Any:
    return stub_trainer(module.ORPOTrainer, default_arguments(module.ORPOConfig), beta=_BETA)


def _mistakes_in_half_precision(
    trainer: Any, own: Callable[..., Any], losses: Callable[..., Any], right: float
) -> list[str]:
    """Return what is wrong in bfloat16 for a sure completion, and on both sides of the border of what is changed."""
    import torch

    mistakes = []
    sure = losses(trainer.odds_ratio_loss, [0.0, -0.5], [-0.1, -1.0], torch.bfloat16)
    if not math.isclose(float(sure[1][0]), right, rel_tol=2e-2):
        mistakes.append(f"in half precision the gradient is {float(sure[1][0])}, and not {right}")
    border = 2 * torch.finfo(torch.bfloat16).eps
    for chosen, rejected in (([-border, -0.5], [-1.0, -1.0]), ([-0.5, -1.0], [-1.0, -border])):
        patched = losses(trainer.odds_ratio_loss, chosen, rejected, torch.bfloat16)
        unpatched = losses(partial(own, trainer), chosen, rejected, torch.bfloat16)
        if not all(
            one.dtype == other.dtype and one.equal(other) for one, other in zip(patched, unpatched, strict=True)
        ):
            mistakes.append(f"in half precision {patched} is not what TRL computes: {unpatched}")
    nearer = -border * (1 - 2**-8)  # the next number
    for chosen, rejected in (([nearer, -0.5], [-1.0, -1.0]), ([-0.5, -1.0], [-1.0, nearer])):
        computed = losses(trainer.odds_ratio_loss, chosen, rejected, torch.bfloat16)[0]
        if computed.dtype is not torch.float32:
            mistakes.append(f"near certainty the loss is computed in {computed.dtype}")
    return mistakes


def _derivative(chosen: float, rejected: float, beta: float) -> float:
    """Return the derivative of the loss by the log-prob of the chosen completion."""
    chosen_odds, rejected_odds = (math.exp(logp) / (1 - math.exp(logp)) for logp in (chosen, rejected))
    return beta * rejected_odds / (chosen_odds + rejected_odds) / (1 - math.exp(chosen))
