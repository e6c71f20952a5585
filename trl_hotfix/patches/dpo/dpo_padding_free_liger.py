"""The Liger loss of DPO with ``padding_free=True`` is NaN, since it has no row of chosen completions.

``_compute_loss_liger`` flattens the batch as ``concatenated_forward`` does and gives Liger labels of shape
``(1, sum of the lengths - 1)``. Liger takes the first half of the rows for the chosen completions
(``len_chosen = target.shape[0] // 2`` in ``LigerFusedLinearPreferenceBase``): half of one row is none, and the mean
over no pairs is NaN. TRL's own code pads the batch instead, as every release from 0.29.0 on does with any
``padding_free=True``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    absent_if_never_flattened,
    dpo_stub,
    judge_with_gradients,
    pair_batch,
    pair_log_probs,
    pair_micro_batches,
    recorded_warnings,
    tiny_causal_lm,
)

_first_warning = Once()


def pad_for_liger(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Compute this loss with padding, since Liger always counts rows."""
    if not instance.padding_free or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    if _first_warning(instance):
        logging.getLogger("trl_hotfix").warning(
            "padding_free=True, but the Liger loss needs a row for each sequence. The batches are padded instead, as "
            "with padding_free=False, and so are the results"
        )
    with shadowed(instance, "padding_free", False):
        return wrapped(*args, **kwargs)


def liger_is_given_a_row_for_each_sequence(module: ModuleType) -> Outcome:
    """Check the log-probs of the rows that Liger is given, and their gradients. Liger itself is not needed.

    Right is a row for each sequence, wrong is one row of all. A row's log-probs are multiplied by its number.
    """
    import torch

    if not hasattr(module.DPOTrainer, "_compute_loss_liger"):
        return absent("there is no Liger loss")
    if absence := absent_if_never_flattened(module):
        return absence
    model = _model()

    def losses() -> Iterator[tuple[Any, Any, Any]]:
        trainers = {is_training: _stub(module, model=model) for is_training in (True, False)}
        for micro_batch in pair_micro_batches():
            trainer = trainers[micro_batch.is_training]
            trainer.state.global_step = micro_batch.step
            model.train(micro_batch.is_training)
            measured = trainer._compute_loss_liger(model, pair_batch(module, micro_batch.pairs))["loss"]
            log_probs = torch.cat(pair_log_probs(model, micro_batch.pairs))
            yield measured, (log_probs * torch.arange(1, 1 + len(log_probs))).sum(), log_probs.sum()

    with recorded_warnings():
        outcome = judge_with_gradients([model.weight], losses())
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes_elsewhere(module, model))):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, **attributes: Any) -> Any:
    defaults = {"padding_free": True, "reference_free": True, "label_pad_token_id": -100, "state": SimpleNamespace()}
    return dpo_stub(module, **{**defaults, "dpo_loss_fn": _numbered_rows, **attributes})


def _numbered_rows(weight: Any, hidden: Any, labels: Any, **kwargs: Any) -> Any:
    """Return what Liger's loss does; the loss is the sum of the log-probs of each row times its number."""
    import torch

    is_label = labels != -100
    log_probs = (hidden @ weight.t()).log_softmax(-1).gather(-1, labels.where(is_label, 0)[..., None])[..., 0]
    rows = (log_probs * is_label).sum(1)
    # Then come log-probs and mean logits of chosen and rejected, the loss of rpo_alpha and both rewards.
    return (rows * torch.arange(1, 1 + len(rows))).sum(), (0.0,) * 7


def _model() -> Any:
    """Return ``tiny_causal_lm`` with a decoder of its own, whose states are the tokens as unit vectors."""
    import torch

    model = tiny_causal_lm()

    def decoder(input_ids: Any, **kwargs: Any) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=torch.nn.functional.one_hot(input_ids, len(model.weight)).float())

    model.get_decoder = lambda: decoder
    model.get_output_embeddings = lambda: SimpleNamespace(weight=model.weight.t())
    return model


class _Encoded(Exception):
    """The encoder was asked for. An encoder-decoder model goes another way from there on."""


def _mistakes_elsewhere(module: ModuleType, model: Any) -> Iterator[str]:
    """Say what is wrong with warnings, without padding_free and with an encoder-decoder model."""

    def get_encoder() -> None:
        raise _Encoded

    model.get_encoder = get_encoder
    batch = pair_batch(module, next(pair_micro_batches()).pairs)
    for attributes, warns in (({}, True), ({"padding_free": False}, False), ({"is_encoder_decoder": True}, False)):
        trainer = _stub(module, **attributes)
        with recorded_warnings() as messages:
            for _ in range(2):
                with suppress(_Encoded):
                    trainer._compute_loss_liger(model, batch)
        if len(messages) != warns:
            yield f"with {attributes} it is said: {messages}"
