"""SFT gives flattened batches to models that do not keep their sequences apart.

``packing`` and ``padding_free`` make one row of all sequences of a batch, whose ``position_ids`` start again with each.
transformers from 4.53 on makes a mask of them. Three kinds of model make none, and nothing warns of it since TRL 1.1:

- those whose mask is made without the positions: GPT-OSS with eager attention, OPT, MPT, Bloom, and on transformers
  4.57 GPT-NeoX's sisters, GraniteMoe and OLMoE (transformers issue 39997);
- those with convolutions or a recurrent state, which runs on: Mamba, Bamba, Falcon-H1, LFM2, Qwen3-Next, Qwen3.5,
  MiniMax (transformers issues 46093, 45034);
- prompt tuning, p-tuning and prefix tuning, where PEFT drops the ``position_ids``.

From 1.16.0 on the batch has a ``seq_idx``. transformers 5.23 hands it to the kernels of some of these, and raises
an error where the kernels are not installed. Those are left alone.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...authoring import (
    Call,
    WarnOnce,
    absent,
    flattened_again,
    in_rows,
    judge,
    places_in_rows,
    plain_model,
    why_sequences_mix,
    wrapper,
)
from ...model import Outcome
from ...testing import flattened_batch, gradient_of_seen, model_of_means, sft_trainer_of

_warn = WarnOnce()

_HAND_SEQ_IDX_ON = frozenset(
    {
        *("bamba", "falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "olmo_hybrid"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
    }
)
"""The ``model_type`` of models whose layers hand ``seq_idx`` to their kernels in transformers 5.23."""


@wrapper
def give_each_sequence_its_row(call: Call) -> Any:
    """Compute the loss of a padded batch where the model would mix the sequences of a flattened one."""
    inputs, trainer = call["inputs"], call.trainer
    positions = inputs.get("position_ids")
    if positions is None or "attention_mask" in inputs or positions.shape != (1, inputs["input_ids"].numel()):
        return call()
    model = plain_model(trainer, call["model"])
    reason = why_sequences_mix(model, no_cache=True)
    if reason is None or _kernels_keep_apart(model, inputs):
        return call()
    _warn(
        trainer,
        "the sequences of a packed or padding-free batch would mix: %s. They are trained as a padded batch: right, "
        "but no faster than without packing and padding_free",
        reason,
    )
    places = places_in_rows(positions, several=False)
    batch = in_rows(inputs, places)
    del batch["position_ids"]
    result = call.with_(inputs=batch)()
    if call["return_outputs"]:
        flattened_again(result[1], places)
    return result


def _kernels_keep_apart(model: Any, inputs: Mapping[str, Any]) -> bool:
    """Return whether the kernels of the model keep sequences apart, or transformers raises an error without them."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config  # type: ignore[union-attr]
    is_adapted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    hands_on = getattr(text, "model_type", None) in _HAND_SEQ_IDX_ON and "seq_idx" in inputs
    return hands_on and not is_adapted and _transformers_asks_for_kernels()


@functools.cache
def _transformers_asks_for_kernels() -> bool:
    """Return whether transformers refuses to compute a packed row without kernels, as 5.23 does and 5.9 does not."""
    from transformers.integrations import hub_kernels

    return "keep packed sequences apart" in inspect.getsource(hub_kernels)


def no_state_runs_into_the_next_sequence(module: ModuleType) -> Outcome:
    """Differentiate the loss of the second of two sequences by what its tokens have seen."""
    if not hasattr(module.DataCollatorForLanguageModeling, "padding_free"):
        return absent("this release has no collator of its own that flattens")
    batch, model = flattened_batch(module), model_of_means(keeps_apart=False)
    if "attention_mask" in batch:
        return absent("the batch has no positions, which sft-padding-free-contamination repairs")
    loss = sft_trainer_of(module, model).compute_loss(model, dict(batch))
    measured, right, in_one_row = gradient_of_seen(model, loss)
    return judge(measured, right=right, wrong=in_one_row / int((batch["labels"] != -100).sum()))
