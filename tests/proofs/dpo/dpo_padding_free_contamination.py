"""Train two steps of two micro-batches, and evaluate, with the real DPOTrainer and padding_free.

Losses and gradients are compared with the formula: right is that of each sequence alone, wrong that of one causal row.
Falcon builds its attention mask itself in every transformers release that TRL 0.14.0 to 0.28.0 accepts. Llama uses the
common function, which separates the sequences from transformers 4.53 on. With the patch both are right with sdpa and
eager attention, with and without a cache, with gradient checkpointing, LoRA and a precomputed reference.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent

import tiny
from tiny import dpo_steps
from tiny.grpo_steps import judged_steps, several_runs

ID = "dpo-padding-free-contamination"

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "The adapter has no place in Falcon. The proof trains a Llama with LoRA itself."}


def train() -> tiny.TrainingResult:
    from trl import DPOTrainer

    forward = getattr(DPOTrainer, "concatenated_forward", None)
    if forward is None or "padding_free" not in inspect.getsource(forward):
        return tiny.TrainingResult(absent("nothing is flattened"))
    run, messages = tiny.warnings_of(lambda: steps(alone_or_mixed, falcon))
    result = run.result
    result.outcome = judged_steps(run)
    patched = trl_hotfix.status()[ID].state.value == "applied"
    assert len(messages) == patched, messages
    assert run.trainer.padding_free is True
    # A variant of the proof is one more setting by itself: it does not repeat the others.
    if patched and not tiny.variant:
        check_all_settings()
    return result


def unaffected() -> tiny.TrainingResult:
    """Train without padding_free, and with it where transformers separates the sequences and there is no cache."""
    runs = {"padded": steps(alone_or_mixed, falcon, padding_free=False)}
    if separates():
        runs["separated"] = steps(dpo_steps.reference_or_policy, tiny.llama)
    for run in runs.values():
        dpo_steps.assert_right(run)
    return several_runs(runs, absent("no sequence attends to another one"))


def separates() -> bool:
    """Return whether TRL makes no cache, as from 0.18.0 on, and transformers separates sequences without one."""
    import transformers
    from packaging.version import Version
    from trl import DPOTrainer

    no_cache = "is_ref_model" in inspect.signature(DPOTrainer.concatenated_forward).parameters
    return no_cache and Version(transformers.__version__) >= Version("4.53")


def steps(formula: dpo_steps.Formula, make: Any, **settings: Any) -> tiny.FormulaSteps:
    # The gradients of Falcon are so large that the second step would hardly be comparable.
    defaults = {"padding_free": True, "learning_rate": 0.01}
    if not settings.get("adapter"):
        settings["reference"] = 1
    return dpo_steps.dpo_steps(formula, make, **{**defaults, **settings})


def falcon(folder: str, seed: int = 0, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, FalconConfig, FalconForCausalLM

    path = Path(folder, f"falcon-{seed}")
    if not path.exists():
        torch.manual_seed(seed)
        config = FalconConfig(
            vocab_size=64,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            alibi=False,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
        model = FalconForCausalLM(config)
        # Falcon's initial weights are so small that attention hardly matters.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(15)
        model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)


def alone_or_mixed(policy: Any, reference: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss where each sequence is alone, and where those of a batch are one causal row."""
    import torch

    with torch.no_grad():
        mixed_reference = flattened_log_probs(reference, batch)
    return {
        "right": dpo_steps.reference_or_policy(policy, reference, batch)["right"],
        "wrong": dpo_steps.sigmoid_loss(flattened_log_probs(policy, batch), mixed_reference),
    }


def flattened_log_probs(model: Any, batch: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return summed log-probs of the completions, each of shape ``(batch,)``, if the batch is one causal sequence."""
    import torch

    token_ids, mask, positions, owner = [], [], [], []
    sequences = list(itertools.product(("chosen", "rejected"), range(len(batch["prompt_input_ids"]))))
    for number, (side, row) in enumerate(sequences):
        length = 0
        for name in ("prompt", side):
            tokens = batch[f"{name}_input_ids"][row][batch[f"{name}_attention_mask"][row].bool()].tolist()
            token_ids += tokens
            mask += [name == side] * len(tokens)
            length += len(tokens)
        positions += range(length)
        owner += [number] * length
    logits = model(torch.tensor([token_ids]), position_ids=torch.tensor([positions]), use_cache=True).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]
    log_probs = log_probs * torch.tensor(mask)[1:]
    summed = torch.zeros(len(sequences)).index_add(0, torch.tensor(owner)[1:], log_probs)
    chosen, rejected = summed.chunk(2)
    return chosen, rejected


def check_all_settings() -> None:
    right = partial(steps, dpo_steps.reference_or_policy)
    checkpointing = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    # Each of two values of attention, cache and checkpointing meets each value of the others.
    cases = (("sdpa", True, {}), ("sdpa", False, checkpointing), ("eager", True, checkpointing), ("eager", False, {}))
    for make in (llama, falcon):
        for attention, use_cache, settings in cases:
            dpo_steps.assert_right(right(partial(make, attention=attention, use_cache=use_cache), **settings))
        dpo_steps.assert_right(right(make, precompute_ref_log_probs=True))
    # With LoRA the reference is the model without its adapter.
    dpo_steps.assert_right(right(llama, adapter=True))


def llama(folder: str, seed: int, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
    from transformers import AutoModelForCausalLM

    tiny.llama(folder, seed=seed)
    path = Path(folder, f"llama-{seed}")
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)
