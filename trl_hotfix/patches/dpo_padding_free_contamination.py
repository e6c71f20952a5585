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
import weakref
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed, why_sequences_mix
from ..model import Outcome
from ..testing import dpo_stub, tiny_causal_lm

_warned: weakref.WeakSet[Any] = weakref.WeakSet()


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
    if instance not in _warned:
        _warned.add(instance)
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
    """Measure the log-prob of the rejected sequence, which comes after the chosen one, in a model that mixes both.

    The logits of the model are a mean over the tokens that it attends to, which is an attention whose keys are all
    equal: ``logits[t] = mean over s <= t of W[input_ids[s]]``. Like any model that builds its mask itself, it attends
    to the whole row unless the attention mask excludes tokens. The right log-prob is that of the sequence alone, the
    wrong one is that with the chosen sequence before it. The result does not depend on transformers.
    """
    import torch

    if not hasattr(module.DPOTrainer, "concatenated_forward"):
        return absent("there is no concatenated_forward: padding_free is switched off in the constructor")
    if "padding_free" not in {field.name for field in fields(module.DPOConfig)}:
        return absent("there is no padding_free")

    class Mean(torch.nn.Module):  # type: ignore[misc]
        def forward(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> SimpleNamespace:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            logits = (lm(input_ids).logits * mask[..., None]).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]
            return SimpleNamespace(logits=logits)

    def log_prob(ids: list[int]) -> float:
        """Return the sum over the last two tokens."""
        logits = Mean()(torch.tensor([ids])).logits[0, -3:-1]
        return float(logits.log_softmax(-1).gather(1, torch.tensor(ids[-2:])[:, None]).sum())

    lm = tiny_causal_lm()
    prompt, chosen, rejected = [1, 2], [3, 4, 5], [6, 7]
    batch = {
        f"{name}_{field}": torch.tensor([ids if field == "input_ids" else [1] * len(ids)])
        for name, ids in (("prompt", prompt), ("chosen", chosen), ("rejected", rejected))
        for field in ("input_ids", "attention_mask")
    }
    trainer = dpo_stub(module, padding_free=True)
    # This trainer is no user's, so the wrapper must not warn about it.
    _warned.add(trainer)
    with torch.no_grad():
        outputs = trainer.concatenated_forward(Mean(), batch)
        return judge(
            float(outputs["rejected_logps"]),
            right=log_prob(prompt + rejected),
            wrong=log_prob(prompt + chosen + prompt + rejected),
            chosen=float(outputs["chosen_logps"]),
        )
