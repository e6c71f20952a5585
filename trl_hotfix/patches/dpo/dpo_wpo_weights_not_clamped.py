"""WPO weighs a pair with more than 1 since TRL 0.29.0: ``torch.clamp(..., max=1)`` is gone.

The weight of a pair is the product of two weights, each ``exp`` of the mean log-prob of a completion, less the log of
the sum of the squared probabilities (WPO, arXiv:2406.11827). TRL clamped the product from its pull request 2141 on, up
to 0.28.0. Pull request 3906 rewrote the loss, and the clamp is gone.

``_compute_loss`` has the weights of all completions from one ``torch.exp``, under no gradient. Nothing else that it
exponentiates has a value for each sequence of the batch: other terms have one for each pair. So TRL's module sees a
``torch`` for one call whose ``exp`` divides the weight of a chosen completion where the product is above 1.
"""

from __future__ import annotations

from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import dpo_stub, tiny_causal_lm


@wrapper
def clamp_the_weights(call: Call) -> Any:
    """Compute the loss with pairs that weigh 1 at most."""
    if not call.trainer.use_weighting:
        return call()
    import torch
    import wrapt
    from trl.trainer import dpo_trainer

    sequences, act = len(call["inputs"]["input_ids"]), call.act_later()

    class Clamping(wrapt.ObjectProxy):  # type: ignore[type-arg]
        @staticmethod
        def exp(values: Any) -> Any:
            result = torch.exp(values)
            if values.shape != (sequences,):
                return result
            chosen, rejected = result.chunk(2)
            excess = (chosen * rejected).clamp(min=1)
            if (excess > 1).any():
                act()
            return torch.cat([chosen / excess, rejected])

    with shadowed(dpo_trainer, "torch", Clamping(torch)):
        return call()


def no_pair_weighs_more_than_1(module: ModuleType) -> Outcome:
    """Divide the gradient of a likely pair with weights by that without: 1, and the product of both with the bug."""
    import torch

    if not hasattr(module.DPOTrainer, "_compute_loss"):
        return absent("this release clamps the weights, or has no weights")
    model, reference = (tiny_causal_lm(SimpleNamespace(model_type="tiny")) for _ in range(2))
    with torch.no_grad():
        # After 2 comes 3 and after 5 comes 4, most likely.
        model.weight.zero_()[[2, 5], [3, 4]] = 2.0
    forward = model.forward

    def with_squares(input_ids: Any, **kwargs: Any) -> Any:
        outputs = forward(input_ids, **kwargs)
        outputs.log_sum_sq_probs = (2 * outputs.logits[:, :-1].log_softmax(-1)).logsumexp(-1)
        return outputs

    ids = torch.tensor([[1, 2, 3], [1, 5, 4]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": (ids == ids[:, 2:]).long()}
    gradients = []
    for use_weighting in (True, False):
        trainer = dpo_stub(
            module,
            model=model,
            ref_model=reference,
            use_weighting=use_weighting,
            loss_types=["sigmoid"],
            loss_weights=[1.0],
            precompute_ref_logps=False,
            state=SimpleNamespace(global_step=0),
            _is_vlm=False,
            _metrics=defaultdict(lambda: defaultdict(list)),
            _total_train_tokens=0,
            _tp_size=1,
        )
        with shadowed(model, "forward", with_squares):
            loss = trainer._compute_loss(model, batch, False)
        gradients.append(float(torch.autograd.grad(loss, model.weight)[0][2, 3]))
    probabilities = model.weight.detach()[2].softmax(-1)
    weight = float(probabilities[3] / probabilities.square().sum()) ** 2
    return judge(gradients[0] / gradients[1], right=1.0, wrong=weight)
