"""The Liger loss of DPO with ``padding_free=True`` is NaN, since it has no row of chosen completions.

``_compute_loss_liger`` flattens the batch as ``concatenated_forward`` does and gives Liger labels of shape
``(1, sum of the lengths - 1)``. Liger takes the first half of the rows for the chosen completions
(``len_chosen = target.shape[0] // 2`` in ``LigerFusedLinearPreferenceBase``): half of one row is no row, and the mean
over no pairs is NaN. TRL's own code pads the batch instead, as every release from 0.29.0 on does with any
``padding_free=True``.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, WarnOnce, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import Pair, absent_if_never_flattened, dpo_stub, pair_batch, recorded_warnings

_warn = WarnOnce()


@wrapper
def pad_for_liger(call: Call) -> Any:
    """Compute this loss with padding, since Liger always counts rows."""
    trainer = call.trainer
    if not trainer.padding_free or trainer.is_encoder_decoder:
        return call()
    _warn(
        trainer,
        "padding_free=True, but the Liger loss needs a row for each sequence. The batches are padded instead, as "
        "with padding_free=False, and so are the results",
    )
    with shadowed(trainer, "padding_free", False):
        return call()


def liger_is_given_a_row_for_each_sequence(module: ModuleType) -> Outcome:
    """Differentiate a loss in Liger's place by the logit of 4 after 2. Liger itself is not needed.

    It is the log-prob of each row times its number. Right is a row for the chosen 3 and one for the rejected 4, which
    both come after 2; wrong is one row of all.
    """
    import torch

    if not hasattr(module.DPOTrainer, "_compute_loss_liger"):
        return absent("there is no Liger loss")
    if absence := absent_if_never_flattened(module):
        return absence
    weight = torch.arange(25.0).sin().reshape(5, 5).requires_grad_()

    def numbered_rows(head: Any, logits: Any, labels: Any, **kwargs: Any) -> Any:
        log_probs = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        rows = (log_probs * (labels != -100)).sum(1)
        return (rows * torch.arange(1, 1 + len(rows))).sum(), (0.0,) * 7

    def decoder(input_ids: Any, **kwargs: Any) -> Any:
        return SimpleNamespace(last_hidden_state=weight[input_ids])

    model = SimpleNamespace(get_decoder=lambda: decoder, get_output_embeddings=lambda: SimpleNamespace(weight=None))
    settings: dict[str, Any] = {
        "padding_free": True,
        "reference_free": True,
        "label_pad_token_id": -100,
        "state": SimpleNamespace(),
    }
    trainer = dpo_stub(module, model=model, dpo_loss_fn=numbered_rows, **settings)
    with recorded_warnings():
        loss = trainer._compute_loss_liger(model, pair_batch(module, [Pair([1, 2], [3], [4], (0.0, 0.0))]))["loss"]
    (gradient,) = torch.autograd.grad(loss, weight)
    prob = float(weight[2].softmax(-1)[4].detach())
    return judge(float(gradient[2, 4]), right=2 - 3 * prob, wrong=1 - 2 * prob)
