"""With the Liger loss and ``padding_free=True`` every DPO loss is NaN.

``_compute_loss_liger`` flattens the batch as ``concatenated_forward`` does, and hands Liger labels of shape
``(1, sum of the lengths - 1)``. Liger takes the first half of the rows for the chosen completions
(``len_chosen = target.shape[0] // 2`` in ``LigerFusedLinearPreferenceBase``): of one row that is none, and the mean
over no pairs is NaN. transformers logs such a loss as 0.0. The batch is padded instead, by TRL's own code, as every
release from 0.29.0 on does with any ``padding_free=True``.
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
from ..stubs import dpo_stub

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


def pad_for_liger(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute this loss with padding: Liger always counts rows."""
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
    """One pair is two rows of labels, a chosen and a rejected one; flattened it is one. Liger itself is not needed."""
    import torch

    if not hasattr(module.DPOTrainer, "_compute_loss_liger"):
        return absent("there is no Liger loss")
    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("padding_free is switched off in the constructor")
    if "padding_free" not in {each.name for each in fields(module.DPOConfig)}:
        return absent("there is no padding_free")

    def loss(weight: Any, hidden: Any, labels: Any, **kwargs: Any) -> Any:
        rows.append(len(labels))
        # The loss; log-probs and mean logits of the chosen and the rejected ones; the loss of rpo_alpha; both rewards.
        return 0.0, (0.0,) * 7

    rows: list[int] = []
    batch = {
        f"{name}_{what}": torch.tensor([ids if what == "input_ids" else [1] * len(ids)])
        for name, ids in (("prompt", [1, 2]), ("chosen", [3, 4, 5]), ("rejected", [6, 7]))
        for what in ("input_ids", "attention_mask")
    }
    said = SimpleNamespace(last_hidden_state=torch.zeros(2, 1))
    model = SimpleNamespace(
        get_decoder=lambda: lambda *args, **kwargs: said,
        get_output_embeddings=lambda: SimpleNamespace(weight=None),
    )
    trainer = dpo_stub(module, padding_free=True, reference_free=True, label_pad_token_id=-100, dpo_loss_fn=loss)
    _warned.add(trainer)  # nobody's run
    trainer._compute_loss_liger(model, batch)
    return judge(rows[0], right=2, wrong=1)
