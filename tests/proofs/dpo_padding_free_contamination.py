"""Train and evaluate the real DPOTrainer with padding_free, and compare with the same run with padding.

Falcon builds its attention mask itself in every transformers release that TRL 0.14.0 to 0.28.0 accepts. Llama uses the
common function, which separates the sequences from transformers 4.53 on. With the patch, both equal padding with sdpa
and eager attention, with and without a cache, with gradient checkpointing, LoRA and a precomputed reference.
"""

from __future__ import annotations

import inspect
import itertools
import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.patches import dpo_padding_free_contamination as patch

import tiny

ID = "dpo-padding-free-contamination"

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "The adapter has no place in Falcon. The proof trains a Llama with LoRA itself."}


def train() -> tiny.TrainingResult:
    import transformers
    from packaging.version import Version
    from trl import DPOTrainer

    if not hasattr(DPOTrainer, "concatenated_forward") or "padding_free" not in inspect.getsource(
        DPOTrainer.concatenated_forward
    ):
        return tiny.TrainingResult(absent("nothing is flattened"))
    with tempfile.TemporaryDirectory() as folder:
        padded, flattened = (
            tiny.dpo_run(falcon(folder), falcon(folder, seed=1), padding_free=padding_free)
            for padding_free in (False, True)
        )
        policy, reference = (flattened_log_probs(falcon(folder, seed=seed), padded.batch) for seed in (0, 1))
        wrong = tiny.dpo_loss(0.5, policy, reference)
        gradient_difference = max(
            float((gradient - flattened.gradients[name]).abs().max()) for name, gradient in padded.gradients.items()
        )
        numbers = {"gradients_differ_by": gradient_difference, "differs_by": padded.difference(flattened)}
        outcome = judge(flattened.loss, right=padded.loss, wrong=wrong, **numbers)
        patched = trl_hotfix.status()[ID].state.value == "applied"
        assert outcome.verdict.value == ("fixed" if patched else "reproduced")
        assert patched == (numbers["differs_by"] < 1e-6), numbers
        llamas = (
            tiny.dpo_run(*(tiny.llama(folder, seed=seed) for seed in (0, 1)), padding_free=padding_free)
            for padding_free in (False, True)
        )
        difference = next(llamas).difference(next(llamas))
        separated = Version(transformers.__version__) >= Version("4.53")
        assert (difference < 1e-5) == (patched or separated), difference
        # A variant of the proof is one more setting by itself: it does not repeat the others.
        if patched and not tiny.variant:
            check_all_settings_equal_padding(folder)
            check_warning_is_logged_once(folder)
            check_separated_sequences_stay_flattened(folder)
    return tiny.TrainingResult(outcome, flattened.loss, flattened.gradients)


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


def flattened_log_probs(model: Any, batch: Any) -> tuple[Any, Any]:
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
    with torch.no_grad():
        logits = model(torch.tensor([token_ids]), position_ids=torch.tensor([positions]), use_cache=True).logits
    log_probs = logits[0, :-1].log_softmax(-1).gather(1, torch.tensor(token_ids)[1:, None])[:, 0]
    log_probs = log_probs * torch.tensor(mask)[1:]
    summed = torch.zeros(len(sequences)).index_add(0, torch.tensor(owner)[1:], log_probs)
    return tuple(summed.chunk(2))


def check_all_settings_equal_padding(folder: str) -> None:
    def llama(seed: int, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
        from transformers import AutoModelForCausalLM

        path = Path(folder, f"llama-{seed}")
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)

    def differs_by(policy: Any, reference: Any, **settings: Any) -> float:
        padded, flattened = (
            tiny.dpo_run(policy(), reference() if reference else None, padding_free=padding_free, **settings)
            for padding_free in (False, True)
        )
        return padded.difference(flattened)

    for make_model in (llama, partial(falcon, folder)):
        for attention, use_cache, checkpointing in itertools.product(("sdpa", "eager"), (True, False), (True, False)):
            policy, reference = (partial(make_model, seed, attention, use_cache=use_cache) for seed in (0, 1))
            settings = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
            difference = differs_by(policy, reference, **(settings if checkpointing else {}))
            assert difference < 1e-5, (make_model, attention, use_cache, checkpointing, difference)
        assert differs_by(partial(make_model, 0), partial(make_model, 1), precompute_ref_log_probs=True) < 1e-5
    # With LoRA the reference is the model without its adapter. By the evaluation, the step has changed the policy.
    assert differs_by(partial(llama, 0), None, learning_rate=0.1) < 1e-5


def check_warning_is_logged_once(folder: str) -> None:
    run, messages = tiny.warnings_of(
        lambda: tiny.dpo_run(falcon(folder), falcon(folder, seed=1), padding_free=True, max_steps=2)
    )
    assert len(messages) == 1
    assert "The batches are padded instead" in messages[0]
    assert run.trainer.padding_free is True


def check_separated_sequences_stay_flattened(folder: str) -> None:
    """Check the ``padding_free`` that the method would run with; FlashAttention itself needs a GPU."""

    def concatenated_forward(model: Any, batch: Any) -> bool:
        return bool(trainer.padding_free)

    def stays_flattened(model: Any, **attributes: Any) -> bool:
        vars(trainer).update({"padding_free": True, "is_encoder_decoder": False, **attributes})
        return bool(patch.pad_what_the_model_would_mix(concatenated_forward, trainer, (model, {}), {}))

    class Trainer:
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    trainer = Trainer()
    model = falcon(folder)
    assert not stays_flattened(model)
    for attention in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"):
        model.config._attn_implementation_internal = attention
        assert stays_flattened(model)
    model._is_stateful = True
    assert not stays_flattened(model)
    assert stays_flattened(model, is_encoder_decoder=True)
    assert not stays_flattened(model, padding_free=False)
