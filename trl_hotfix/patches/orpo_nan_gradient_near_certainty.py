"""ORPO's gradient is NaN as soon as the model is sure of a completion.

The loss has the logarithm of the odds of a completion (arXiv:2403.07691, equations 3 to 7), whose mean log-prob per
token is x: ``x - log(1 - exp(x))``. In float32 ``exp(x)`` is 1 from x > -6e-8 on, so that the logarithm is -inf and its
derivative inf. The factor before it, ``sigmoid(-log odds ratio)``, is 0 then if the completion is the chosen one, and 0
times inf is NaN; the loss itself is finite, so that nothing is seen until the weights are NaN. Up to 0.26.2 all this is
done in the dtype of the logits: in bfloat16 it takes no more than x > -0.004, a mean probability of 99.6 %.

TRL 0.27.0 (pull request 4763) computes in float32 and takes ``log(-expm1(x))`` near 0. That is right for more values of
x, and has the same NaN where float32 cannot tell ``exp(x)`` from 1: ``torch.where`` hands a gradient of 0 to the branch
that was not taken, whose derivative is inf.

Here an x nearer to 0 than ``-2**-22`` is taken for that number, which leaves the value as it is but for rounding. The
gradient goes through as if it were x: as x goes to 0 the two factors cancel, and what is left, the odds of the other
completion, is the same at both. Half precision is computed in float32 if it would come to this, as from 0.27.0 on. Up
to 0.11.4 ``log(sigmoid(...))`` rounds that gradient to a multiple of 0.25 times beta, which is finite too.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import argument, judge, replaced_argument
from ..model import Outcome, Verdict
from ..stubs import absent_if_reexported, default_arguments, stub_trainer

_NEAREST = -(2.0**-22)
"""Nearer to 0, and ``exp`` of it in float32 may be 1: two units in the last place are left to who computes it."""


def keep_away_from_certainty(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call ``odds_ratio_loss`` with log-probs that are not so near to 0 that their odds are infinite."""
    import torch

    names = ("policy_chosen_logps", "policy_rejected_logps")
    given = [argument(wrapped, args, kwargs, name) for name in names]
    if any(each.dtype in (torch.float16, torch.bfloat16) for each in given):
        if not any((each > -2 * torch.finfo(each.dtype).eps).any() for each in given):
            return wrapped(*args, **kwargs)
        given = [each.float() for each in given]
    for name, each in zip(names, given, strict=True):
        # To add 0 changes nothing, so that there is no need to ask the device whether there is anything to do.
        away = torch.where(each > _NEAREST, _NEAREST - each, torch.zeros_like(each)).detach()
        args, kwargs = replaced_argument(wrapped, args, kwargs, name, each + away)
    return wrapped(*args, **kwargs)


def gradient_of_a_sure_model_is_finite(module: ModuleType) -> Outcome:
    """The gradients for a chosen completion with a log-prob of -1e-8, and a rejected one with -0.1."""
    import torch

    if elsewhere := absent_if_reexported(module, module.ORPOTrainer.odds_ratio_loss):
        return elsewhere
    beta = 0.5
    trainer = stub_trainer(module.ORPOTrainer, default_arguments(module.ORPOConfig), beta=beta)

    def gradients(chosen: float, rejected: float, dtype: Any) -> list[float]:
        given = [torch.tensor([each], dtype=dtype, requires_grad=True) for each in (chosen, rejected)]
        trainer.odds_ratio_loss(*given)[0].sum().backward()
        return [float(each.grad) for each in given]

    sure = gradients(-1e-8, -0.1, torch.float32)
    # The odds of the rejected completion: the limit for log-probs of the chosen one that go to 0.
    right = beta * math.exp(-0.1) / (1 - math.exp(-0.1))
    outcome = judge(float(sum(map(math.isfinite, sure))), right=2.0, wrong=1.0, chosen=str(sure[0]), formula=right)
    # Up to 0.11.4 log(sigmoid(...)) rounds what a sigmoid lacks to 1 to multiples of 2**-24.
    if outcome.verdict is Verdict.FIXED and not math.isclose(sure[0], right, rel_tol=2e-2):
        raise AssertionError(f"the gradient is finite and not that of the formula: {outcome}")
    half = gradients(0.0, -0.1, torch.bfloat16)
    if outcome.verdict is Verdict.FIXED and not math.isclose(half[0], right, rel_tol=2e-2):
        raise AssertionError(f"in half precision the gradient is not that of the formula: {half}")
    # Where nothing is wrong: the derivative of the formula, and the same in every release.
    usual, expected = gradients(-0.5, -1.0, torch.float32), _derivative(-0.5, -1.0, beta)
    if not math.isclose(usual[0], expected, rel_tol=1e-4):
        raise AssertionError(f"the gradient is {usual[0]}, and not {expected}")
    return outcome


def _derivative(chosen: float, rejected: float, beta: float) -> float:
    odds = [math.exp(each) / (1 - math.exp(each)) for each in (chosen, rejected)]
    return beta * odds[1] / (odds[0] + odds[1]) / (1 - math.exp(chosen))
