"""The proof: one step of the real DPOTrainer with padding_free, and an evaluation, against the same with padding.

Falcon builds its attention mask itself, in every transformers that TRL 0.14.0 to 0.28.0 can have; Llama builds it where
transformers separates the sequences, from 4.53 on. With the patch each of them gives what padding gives: sdpa and
eager, with and without a cache, gradient checkpointing, LoRA and a precomputed reference.
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
        padded, mixed = (
            tiny.dpo_run(falcon(folder), falcon(folder, seed=1), padding_free=padding_free)
            for padding_free in (False, True)
        )
        policy, reference = (flattened_log_probs(falcon(folder, seed=seed), padded.batch) for seed in (0, 1))
        wrong = tiny.dpo_loss(0.5, policy, reference)
        gradients = max(float((its - mixed.gradients[name]).abs().max()) for name, its in padded.gradients.items())
        numbers = {"gradients_differ_by": gradients, "differs_by": padded.difference(mixed)}
        outcome = judge(mixed.loss, right=padded.loss, wrong=wrong, **numbers)
        patched = trl_hotfix.status()[ID].state.value == "applied"
        assert outcome.verdict.value == ("fixed" if patched else "reproduced")
        assert patched == (numbers["differs_by"] < 1e-6), numbers
        llamas = (
            tiny.dpo_run(*(tiny.llama(folder, seed=seed) for seed in (0, 1)), padding_free=padding_free)
            for padding_free in (False, True)
        )
        difference = next(llamas).difference(next(llamas))
        apart = Version(transformers.__version__) >= Version("4.53")
        assert (difference < 1e-5) == (patched or apart), difference
        # Of all this, a variant of the proof is one more.
        if patched and not tiny.variant:
            padding_is_what_all_of_them_give(folder)
            it_is_said_once(folder)
            what_is_kept_apart_stays_flattened(folder)
    return tiny.TrainingResult(outcome, mixed.loss, mixed.gradients)


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
        # Falcon starts with weights so small that attention hardly matters.
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.mul_(15)
        model.save_pretrained(path)
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)


def flattened_log_probs(model: Any, batch: Any) -> tuple[Any, Any]:
    """Summed log-probs of the completions, each of shape ``(batch,)``, in one row that is attended to as one."""
    import torch

    ids, counted, positions, owner = [], [], [], []
    sequences = list(itertools.product(("chosen", "rejected"), range(len(batch["prompt_input_ids"]))))
    for number, (side, row) in enumerate(sequences):
        its = []
        for name in ("prompt", side):
            tokens, mask = (batch[f"{name}_{what}"][row] for what in ("input_ids", "attention_mask"))
            its += [(int(token), name == side) for token in tokens[mask.bool()]]
        ids += [token for token, _ in its]
        counted += [completion for _, completion in its]
        positions += range(len(its))
        owner += [number] * len(its)
    with torch.no_grad():
        logits = model(torch.tensor([ids]), position_ids=torch.tensor([positions]), use_cache=True).logits[0, :-1]
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(ids)[1:, None])[:, 0] * torch.tensor(counted)[1:]
    summed = torch.zeros(len(sequences)).index_add(0, torch.tensor(owner)[1:], log_probs)
    return tuple(summed.chunk(2))


def padding_is_what_all_of_them_give(folder: str) -> None:
    def llama(seed: int, attention: str = "sdpa", *, use_cache: bool = True) -> Any:
        from transformers import AutoModelForCausalLM

        path = Path(folder, f"llama-{seed}")
        return AutoModelForCausalLM.from_pretrained(path, attn_implementation=attention, use_cache=use_cache)

    def its_falcon(seed: int, *wanted: Any, **settings: Any) -> Any:
        return falcon(folder, seed, *wanted, **settings)

    def differs_by(policy: Any, reference: Any, **settings: Any) -> float:
        runs = [
            tiny.dpo_run(policy(), reference() if reference else None, padding_free=padding_free, **settings)
            for padding_free in (False, True)
        ]
        return runs[0].difference(runs[1])

    for made in (llama, its_falcon):
        for attention, use_cache, checkpointing in itertools.product(("sdpa", "eager"), (True, False), (True, False)):
            policy, reference = (partial(made, seed, attention, use_cache=use_cache) for seed in (0, 1))
            how = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
            difference = differs_by(policy, reference, **(how if checkpointing else {}))
            assert difference < 1e-5, (made, attention, use_cache, checkpointing, difference)
        assert differs_by(partial(made, 0), partial(made, 1), precompute_ref_log_probs=True) < 1e-5
    # With LoRA the reference is the model without its adapter; the policy is another one in the evaluation.
    assert differs_by(partial(llama, 0), None, learning_rate=0.1) < 1e-5


def it_is_said_once(folder: str) -> None:
    run, said = tiny.warnings_of(
        lambda: tiny.dpo_run(falcon(folder), falcon(folder, seed=1), padding_free=True, max_steps=2)
    )
    assert len(said) == 1
    assert "The batches are padded instead" in said[0]
    assert run.trainer.padding_free is True


def what_is_kept_apart_stays_flattened(folder: str) -> None:
    """FlashAttention needs a GPU: what the method would run with is looked at instead."""

    def concatenated_forward(model: Any, batch: Any) -> bool:
        return bool(trainer.padding_free)

    def flattened(model: Any, **attributes: Any) -> bool:
        vars(trainer).update({"padding_free": True, "is_encoder_decoder": False, **attributes})
        return bool(patch.pad_what_the_model_would_mix(concatenated_forward, trainer, (model, {}), {}))

    class Trainer:
        accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    trainer = Trainer()
    model = falcon(folder)
    assert not flattened(model)
    for attention in ("flash_attention_2", "flash_attention_3", "kernels-community/flash-attn"):
        model.config._attn_implementation_internal = attention
        assert flattened(model)
    model._is_stateful = True
    assert not flattened(model)
    assert flattened(model, is_encoder_decoder=True)
    assert not flattened(model, padding_free=False)
