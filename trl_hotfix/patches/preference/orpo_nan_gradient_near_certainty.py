"""ORPO's gradient is NaN when the model is sure of a completion.

The loss contains the log odds of a completion (arXiv:2403.07691, equations 3 to 7). With x, its mean log-prob per
token, they are ``x - log(1 - exp(x))``. In float32 ``exp(x)`` is 1 from x > -6e-8 on, so the logarithm is -inf and
its derivative inf. For the chosen completion the factor before it, ``sigmoid(-log odds ratio)``, is 0 then, and
0 * inf is NaN. Up to 0.26.2 the dtype is the logits' own; in bfloat16 x > -0.004 is enough.

TRL 0.27.0 (pull request 4763) computes in float32 and uses ``log(-expm1(x))`` near 0. That is right for more values
of x, but has the same NaN where float32 cannot tell ``exp(x)`` from 1: ``torch.where`` passes a gradient of 0 to the
branch that was not taken, whose derivative is inf.

The wrapper replaces an x nearer to 0 than ``-2**-22`` by that number, which changes the value only by rounding. The
gradient passes through as if it were x: as x goes to 0 the two factors cancel, and their product, the odds of the
other completion, is the same at both numbers. Half precision is computed in float32 near 0, as from 0.27.0 on.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ...authoring import Call, judge, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, default_arguments, stub_trainer

_LARGEST_LOGP = -(2.0**-22)
"""Above this number ``exp`` may be 1 in float32. It leaves implementations of ``exp`` two units in the last place."""


@wrapper
def keep_away_from_certainty(call: Call) -> Any:
    """Call ``odds_ratio_loss`` with log-probs that are far enough from 0 for their odds to be finite."""
    import torch

    batches = {name: call[name] for name in ("policy_chosen_logps", "policy_rejected_logps")}
    half = any(logps.dtype in (torch.float16, torch.bfloat16) for logps in batches.values())
    if half and not any((logps > -2 * torch.finfo(logps.dtype).eps).any() for logps in batches.values()):
        return call()
    for name, logps in batches.items():
        logps = logps.float() if half else logps
        # Adding 0 changes nothing, so the shift needs no check that would synchronise with the device.
        shift = torch.where(logps > _LARGEST_LOGP, _LARGEST_LOGP - logps, torch.zeros_like(logps)).detach()
        batches[name] = logps + shift
    return call.with_(**batches)()


def gradient_of_a_sure_model_is_finite(module: ModuleType) -> Outcome:
    """Differentiate the loss by a chosen log-prob that float32 cannot tell from 0. With the bug the gradient is NaN.

    As the log-prob goes to 0, the gradient goes to beta times the odds of the rejected completion, which are 1 here.
    """
    import torch

    if reexported := absent_if_reexported(module, module.ORPOTrainer.odds_ratio_loss):
        return reexported
    beta, chosen = 0.5, torch.tensor([-1e-8], requires_grad=True)
    trainer = stub_trainer(module.ORPOTrainer, default_arguments(module.ORPOConfig), beta=beta)
    losses = trainer.odds_ratio_loss(chosen, torch.tensor([math.log(0.5)]))[0]
    (gradient,) = torch.autograd.grad(losses.sum(), chosen)
    return judge(float(gradient.nan_to_num()), right=beta, wrong=0.0)
