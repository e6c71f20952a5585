"""The name of ``trl_hotfix.testing`` up to 0.1.0, kept for packs.

Three things had other names then: ``alone`` is ``single_process`` now, ``Enough`` is ``StopConstruction``, and
``handed_on`` is ``absent_if_reexported``.
"""

from __future__ import annotations

from .testing import (
    ONE_PROCESS,
    CharacterTokenizer,
    StopConstruction,
    absent_if_reexported,
    begin_trainer,
    completions_of,
    constructed,
    default_arguments,
    dpo_stub,
    online_dpo_stub,
    sft_moe_loss,
    sft_prepared,
    single_process,
    stream,
    stub_grpo_trainer,
    stub_that_generates,
    stub_trainer,
    tiny_attention_model,
    tiny_causal_lm,
    tiny_tokenizer,
    wrapped_like_deepspeed,
)

alone = single_process
Enough = StopConstruction
handed_on = absent_if_reexported

__all__ = [
    "ONE_PROCESS",
    "CharacterTokenizer",
    "Enough",
    "StopConstruction",
    "absent_if_reexported",
    "alone",
    "begin_trainer",
    "completions_of",
    "constructed",
    "default_arguments",
    "dpo_stub",
    "handed_on",
    "online_dpo_stub",
    "sft_moe_loss",
    "sft_prepared",
    "single_process",
    "stream",
    "stub_grpo_trainer",
    "stub_that_generates",
    "stub_trainer",
    "tiny_attention_model",
    "tiny_causal_lm",
    "tiny_tokenizer",
    "wrapped_like_deepspeed",
]
