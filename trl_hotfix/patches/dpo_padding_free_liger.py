"""The Liger loss of DPO with ``padding_free=True`` is NaN, since it has no row of chosen completions.

``_compute_loss_liger`` flattens the batch as ``concatenated_forward`` does and gives Liger labels of shape
``(1, sum of the lengths - 1)``. Liger takes the first half of the rows for the chosen completions
(``len_chosen = target.shape[0] // 2`` in ``LigerFusedLinearPreferenceBase``): half of one row is none, and the mean
over no pairs is NaN. TRL's own code pads the batch instead, as every release from 0.29.0 on does with any
``padding_free=True``.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..testing import dpo_stub

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def pad_for_liger(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute this loss with padding, since Liger always counts rows."""
    if not instance.padding_free or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    if instance not in _warned:
        _warned.add(instance)
        logging.getLogger("trl_hotfix").warning(
            "padding_free=True, but the Liger loss needs a row for each sequence. The batches are padded instead, as "
            "with padding_free=False, and so are the results"
        )
    with shadowed(instance, "padding_free", False):
        return wrapped(*args, **kwargs)


def liger_is_given_a_row_for_each_sequence(module: ModuleType) -> Outcome:
    """Count the rows of labels that Liger is given for one pair.

    Right are two rows, a chosen and a rejected one; flattened they are one. Liger itself is not needed.
    """
    import torch

    if not hasattr(module.DPOTrainer, "_compute_loss_liger"):
        return absent("there is no Liger loss")
    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("padding_free is switched off in the constructor")
    if "padding_free" not in {field.name for field in fields(module.DPOConfig)}:
        return absent("there is no padding_free")

    def loss(weight: Any, hidden: Any, labels: Any, **kwargs: Any) -> Any:
        rows.append(len(labels))
        # The loss, then log-probs and mean logits of chosen and rejected, the loss of rpo_alpha and both rewards.
        return 0.0, (0.0,) * 7

    rows: list[int] = []
    batch = {
        f"{name}_{field}": torch.tensor([ids if field == "input_ids" else [1] * len(ids)])
        for name, ids in (("prompt", [1, 2]), ("chosen", [3, 4, 5]), ("rejected", [6, 7]))
        for field in ("input_ids", "attention_mask")
    }
    outputs = SimpleNamespace(last_hidden_state=torch.zeros(2, 1))
    model = SimpleNamespace(
        get_decoder=lambda: lambda *args, **kwargs: outputs,
        get_output_embeddings=lambda: SimpleNamespace(weight=None),
    )
    trainer = dpo_stub(module, padding_free=True, reference_free=True, label_pad_token_id=-100, dpo_loss_fn=loss)
    # This trainer is no user's, so the wrapper must not warn about it.
    _warned.add(trainer)
    trainer._compute_loss_liger(model, batch)
    return judge(rows[0], right=2, wrong=1)
