"""Tiny models, tokenizers and data, and trainers that can be made in every release.

``models``: causal language models of two layers, and adapters. ``data``: tokenizers and datasets. ``trainers``: configs
and trainers by the names of this release. ``measuring``: records of what a trainer computes; ``steps``: of whole
optimizer steps. ``grpo_runs``, ``dpo_runs``, ``sft_runs``, ``online_runs``, ``distillation``: trainers and runs by
method; ``accumulation``: what micro-batches add up to. ``launching``: one process, DeepSpeed. ``variants``: the state
that the bench sets (``tiny.state``).

Nothing heavy is imported before it is used: a caller may install patches first.
"""

from __future__ import annotations

from typing import Any

from .data import chat_tokenizer, labelled, preferences, tokenizer
from .dpo_runs import (
    dpo_loss,
    one_step_of_moe_dpo,
    precomputed_dpo,
    preference_log_probs,
)
from .grpo_runs import COMPLETION_LENGTHS, PROMPTS, grpo, grpo_of_one_length
from .launching import deepspeed, one_group, one_process
from .measuring import FirstStep, TrainingResult, measured, warnings_of
from .models import (
    gpt_neo,
    granite,
    lfm2,
    llama,
    lora,
    mixtral,
    modernbert_decoder,
    opt,
    quantised,
    qwen2_moe,
    same_adapter,
    set_adapters,
)
from .online_runs import ONLINE_LENGTHS, online_completions, online_dpo, online_log_probs
from .sft_runs import SftRun, several, sft_step
from .steps import (
    FormulaSteps,
    MicroBatch,
    Step,
    acts,
    counted,
    expected_gradients,
    gradients_of,
    loss_of_model,
    result_of_runs,
    stepwise,
)
from .trainers import classes, config, parameters, trainer
from .variants import state

__all__ = [
    "COMPLETION_LENGTHS",
    "ONLINE_LENGTHS",
    "PROMPTS",
    "FirstStep",
    "FormulaSteps",
    "MicroBatch",
    "SftRun",
    "Step",
    "TrainingResult",
    "acts",
    "chat_tokenizer",
    "classes",
    "config",
    "counted",
    "deepspeed",
    "dpo_loss",
    "expected_gradients",
    "gpt_neo",
    "gradients_of",
    "granite",
    "grpo",
    "grpo_of_one_length",
    "labelled",
    "lfm2",
    "llama",
    "lora",
    "loss_of_model",
    "measured",
    "mixtral",
    "modernbert_decoder",
    "one_group",
    "one_process",
    "one_step_of_moe_dpo",
    "online_completions",
    "online_dpo",
    "online_log_probs",
    "opt",
    "parameters",
    "precomputed_dpo",
    "preference_log_probs",
    "preferences",
    "quantised",
    "qwen2_moe",
    "result_of_runs",
    "same_adapter",
    "set_adapters",
    "several",
    "sft_step",
    "state",
    "stepwise",
    "tokenizer",
    "trainer",
    "warnings_of",
]


def __getattr__(name: str) -> Any:
    """Return a field of ``tiny.state``: ``tiny.variant`` is the variant at the time when it is read."""
    if name in vars(state):
        return getattr(state, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
