"""DPO with ``padding_free=True`` passes one row of many sequences to models that do not separate them.

``concatenated_forward`` flattens the chosen and the rejected sequences of a batch to shape ``(1, sum of the lengths)``,
with ``position_ids`` that start again at 0 with each sequence and no attention mask (TRL pull request 2520). TRL only
warns. Whether the sequences are separated depends on the attention:

- FlashAttention takes the sequence borders from the ``position_ids`` (transformers pull request 31629).
- sdpa, eager and flex do so from transformers 4.53 on (``masking_utils.find_packed_sequence_indices``), in models that
  build their mask there, and only where no cache is made. DPO passes ``use_cache=False`` from 0.18.0 on.

A block-diagonal mask would keep the row, but its size is the square of the flattened length, every implementation needs
another format and the auxiliary loss of mixture-of-experts models cannot read any. So TRL's own code pads the batch
instead, as every release from 0.29.0 on does with any ``padding_free=True``. The reference's forwards go through
``concatenated_forward`` too, also those of ``precompute_ref_log_probs``.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, argument, shadowed, why_sequences_mix
from ...model import Outcome, Verdict
from ...testing import (
    Pair,
    absent_if_never_flattened,
    dpo_stub,
    forwarded,
    judge_with_gradients,
    pair_batch,
    pair_micro_batches,
    recorded_warnings,
    tiny_attention_model,
    tiny_causal_lm,
    weighted_log_probs,
)

_first_warning = Once()


def pad_what_the_model_would_mix(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run this forward with padding, unless the model keeps the sequences of a flattened batch apart."""
    # The batch of an encoder-decoder model is never flattened.
    if not instance.padding_free or instance.is_encoder_decoder:
        return wrapped(*args, **kwargs)
    plain = instance.accelerator.unwrap_model(argument(wrapped, args, kwargs, "model"))
    # 0.18.0 brought both this parameter and use_cache=False.
    reason = why_sequences_mix(plain, no_cache="is_ref_model" in inspect.signature(wrapped).parameters)
    if reason is None:
        return wrapped(*args, **kwargs)
    if _first_warning(instance):
        logging.getLogger("trl_hotfix").warning(
            "padding_free=True, but the sequences of a flattened batch would attend to one another: %s. The batches "
            "are padded instead, as with padding_free=False, and so are the results. To keep padding_free, load the "
            "model and the reference in half precision on a GPU with attn_implementation='flash_attention_2' (in "
            "model_init_kwargs and ref_model_init_kwargs if the trainer loads them). Recurrent layers and prompt "
            "tuning cannot have it",
            reason,
        )
    with shadowed(instance, "padding_free", False):
        return wrapped(*args, **kwargs)


def a_sequence_does_not_see_the_one_before_it(module: ModuleType) -> Outcome:
    """Check the log-probs of all sequences in a model that mixes them, and their gradients.

    The logits of the model are a mean over the tokens that it attends to, which is an attention whose keys are all
    equal: ``logits[t] = mean over s <= t of W[input_ids[s]]``. Like any model that builds its mask itself, it attends
    to the whole row unless the attention mask excludes tokens. Right are the log-probs of each sequence alone, wrong
    those with all sequences of the row before it. The result does not depend on transformers.
    """
    if absence := absent_if_never_flattened(module):
        return absence
    model = tiny_causal_lm()
    model.register_forward_hook(_attend_to_all, with_kwargs=True)
    trainers = _stub(module, model=model), _stub(module, model=model)

    def formula(pairs: Sequence[Pair]) -> tuple[Any, Any]:
        return _log_probs(model, pairs, mixed=False), _log_probs(model, pairs, mixed=True)

    with recorded_warnings():
        outcome = judge_with_gradients([model.weight], weighted_log_probs(module, model, trainers, formula))
    if outcome.verdict is Verdict.FIXED and (mistakes := list(_mistakes_elsewhere(module, model))):
        raise AssertionError("; ".join(mistakes))
    return outcome


def _stub(module: ModuleType, **attributes: Any) -> Any:
    defaults = {"padding_free": True, "label_pad_token_id": -100, "state": SimpleNamespace()}
    return dpo_stub(module, **{**defaults, **attributes})


def _attend_to_all(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Any) -> None:
    import torch

    mask = kwargs.get("attention_mask", torch.ones_like(args[0]))[..., None]
    outputs.logits = (outputs.logits * mask).cumsum(1) / mask.cumsum(1).clamp(min=1)


def _log_probs(model: Any, pairs: Sequence[Pair], *, mixed: bool) -> Any:
    """Return the log-prob of each completion, chosen before rejected: alone, or ``mixed`` with those before it."""
    import torch

    before: list[int] = []
    log_probs = []
    for prompt, completion in [(pair.prompt, pair.chosen) for pair in pairs] + [
        (pair.prompt, pair.rejected) for pair in pairs
    ]:
        tokens = torch.tensor([*before, *prompt, *completion])
        logits = model.weight[tokens].cumsum(0) / torch.arange(1, 1 + len(tokens))[:, None]
        of_tokens = logits[:-1].log_softmax(-1).gather(1, tokens[1:, None])
        log_probs.append(of_tokens[-len(completion) :].sum())
        before = tokens.tolist() if mixed else []
    return torch.stack(log_probs)


def _mistakes_elsewhere(module: ModuleType, mixing: Any) -> Iterator[str]:
    """Say which runs are padded and should not be, or the other way round, and what is wrong with warnings."""
    batch = pair_batch(module, next(pair_micro_batches()).pairs)
    flash = tiny_causal_lm(SimpleNamespace(_attn_implementation="flash_attention_2"))
    llama = tiny_attention_model()
    # Whether a cache is made in this release.
    no_cache = forwarded(_stub(module, padding_free=False), llama, batch).get("use_cache") is False
    llama_mixes = why_sequences_mix(llama, no_cache=no_cache) is not None
    cases: tuple[tuple[str, Any, dict[str, Any], bool, bool], ...] = (
        ("a model that mixes sequences", mixing, {}, False, True),
        ("FlashAttention", flash, {}, True, False),
        ("Llama", llama, {}, not llama_mixes, llama_mixes),
        ("padding", mixing, {"padding_free": False}, False, False),
        ("an encoder-decoder model", mixing, {"is_encoder_decoder": True}, False, False),
    )
    for name, model, attributes, is_flattened, warns in cases:
        trainer = _stub(module, **attributes)
        with recorded_warnings() as messages:
            # The labels of an encoder-decoder model are masked in place.
            batches = [{name: value.clone() for name, value in batch.items()} for _ in range(2)]
            flattened = [len(forwarded(trainer, model, copied)["input_ids"]) == 1 for copied in batches]
        if flattened != [is_flattened] * 2 or len(messages) != warns:
            yield f"with {name} the batch is flattened: {flattened}; it is said: {messages}"
