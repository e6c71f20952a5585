"""DPO unpacks the six values of the reference's forward into five names.

With ``output_router_logits=True``, ``concatenated_forward`` returns six values, the auxiliary loss last. For the policy
``get_batch_loss_metrics`` takes the first five and then the sixth. It unpacks the reference's into five names, and so
does ``compute_reference_log_probs``. TRL 0.11.0 takes the values that it needs (pull request 2039). The repair lets
the calls for the reference return five values.

As soon as the step runs, these releases also read the coefficient from the wrapped model, so that under DeepSpeed it
would be 0 (see ``moe_aux_loss_lost_under_deepspeed``). So the wrapper also gives ``get_batch_loss_metrics`` the plain
model's config.
"""

from __future__ import annotations

import itertools
from contextlib import AbstractContextManager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, with_config, wrapper
from ...model import Outcome
from ...testing import Pair, dpo_stub, pair_batch, tiny_moe_lm


@wrapper
def unpack_reference_of_loss(call: Call) -> Any:
    """Give ``get_batch_loss_metrics`` six values of the policy, which it calls first, and five of the reference."""
    trainer = call.trainer
    if not trainer.aux_loss_enabled:
        return call()
    model, changed = call["model"], call.with_()
    if not hasattr(getattr(model, "config", None), "router_aux_loss_coef"):
        changed = call.with_(model=with_config(model, trainer.accelerator.unwrap_model(trainer.model).config))
    with _five_values(trainer, after=1):
        return changed()


@wrapper
def unpack_reference(call: Call) -> Any:
    """Give ``compute_reference_log_probs``, which calls the reference only, five values."""
    if not call.trainer.aux_loss_enabled:
        return call()
    with _five_values(call.trainer, after=0):
        return call()


def _five_values(trainer: Any, after: int) -> AbstractContextManager[None]:
    """Let all calls of ``trainer.concatenated_forward`` but the first ``after`` return five values."""
    forward = trainer.concatenated_forward
    calls = itertools.count()

    def five(*args: Any, **kwargs: Any) -> Any:
        values = forward(*args, **kwargs)
        return values if next(calls) < after else values[:5]

    return shadowed(trainer, "concatenated_forward", five)


def loss_and_reference_are_computed(module: ModuleType) -> Outcome:
    """Add the derivative of the loss by the router's weight, 2, and the reference's log-prob of 3 after 2.

    The loss has 0.5 times the weight's square times the mean of all tokens of the pair. With the bug neither is
    computed: both calls end with the same error.
    """
    import torch

    model = tiny_moe_lm(SimpleNamespace(router_aux_loss_coef=0.5, output_router_logits=True, model_type="tiny"))
    trainer = dpo_stub(module, model=model, ref_model=model, aux_loss_enabled=True, state=SimpleNamespace())
    batch = pair_batch(module, [Pair([1, 2], [3], [4], (0.0, 0.0))])

    def of_loss() -> Any:
        loss, _ = trainer.get_batch_loss_metrics(model, batch, train_eval="train")
        return torch.autograd.grad(loss, model.router)[0]

    measured = 0.0
    for compute in (of_loss, lambda: trainer.compute_reference_log_probs(batch)[0].sum()):
        try:
            measured += float(compute())
        except ValueError as error:
            if "too many values to unpack" not in str(error):
                raise
    log_prob = model.weight[2].log_softmax(-1)[3]
    return judge(measured, right=2 * (1 + 2 + 3 + 1 + 2 + 4) / 6 + float(log_prob.detach()), wrong=0.0)
