"""DPO compares its f-divergence with texts where it has a member of an enumeration, or the other way round.

Up to 0.23 ``dpo_loss`` asks whether ``f_divergence_type`` equals ``FDivergenceType.JS_DIVERGENCE.value``, which is a
text. The config declares ``FDivergenceType``, and the command line makes a member of it, which equals no text: TRL
computes the loss of the reverse KL. 0.24.0 makes a member of whatever is given and compares members (pull request
4171). The config of 0.28.0 makes a text again, which equals no member, so that every divergence is the reverse KL.
0.29.0 has texts only. The wrappers give the method what it compares with.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, module_of, shadowed, wrapper
from ...model import Outcome
from ...testing import dpo_stub


@wrapper
def compare_the_text(call: Call) -> Any:
    """Compute the loss with the text of the divergence on the trainer (up to 0.23)."""
    divergence = call.trainer.f_divergence_type
    return _with_divergence(call, getattr(divergence, "value", divergence))


@wrapper
def compare_the_member(call: Call) -> Any:
    """Compute the loss with the member of the enumeration on the trainer (0.28.0)."""
    return _with_divergence(call, module_of(call).FDivergenceType(call.trainer.f_divergence_type))


def _with_divergence(call: Call, compared: Any) -> Any:
    given = call.trainer.f_divergence_type
    if compared is given or "reverse_kl" in (given, compared):
        return call()
    with shadowed(call.trainer, "f_divergence_type", compared):
        return call()


def loss_is_that_of_the_divergence(module: ModuleType) -> Outcome:
    """Differentiate the loss of the Jensen-Shannon divergence by the log-prob of the chosen completion.

    Wang et al. 2024 (arXiv:2309.16240) have the derivative of the divergence, ``log(2u / (1 + u))``, which is the
    logarithm of ``u`` with the reverse KL. The log-ratios of policy and reference are 1 and -0.5.
    """
    import torch

    if not hasattr(module.DPOTrainer, "dpo_loss"):
        return absent("this release has no dpo_loss")
    divergence = module.FDivergenceType.JS_DIVERGENCE
    post_init = vars(module.DPOConfig).get("__post_init__")
    if post_init is not None and "value" in post_init.__code__.co_names:
        # The config of 0.28.0 makes a text of what it is given.
        divergence = divergence.value
    trainer = dpo_stub(
        module, f_divergence_type=divergence, beta=0.5, loss_type="sigmoid", label_smoothing=0.0, reference_free=False
    )
    chosen = torch.tensor([-2.0], requires_grad=True)
    losses = trainer.dpo_loss(chosen, torch.tensor([-2.5]), torch.tensor([-3.0]), torch.tensor([-2.0]))[0]
    (gradient,) = torch.autograd.grad(losses.sum(), chosen)
    js = 1.5 - math.log1p(math.exp(1.0)) + math.log1p(math.exp(-0.5))
    right, wrong = -0.5 / (1 + math.exp(0.5 * js)) / (1 + math.e), -0.5 / (1 + math.exp(0.75))
    return judge(float(gradient), right=right, wrong=wrong)
