"""Losses and gradients of one step against another computation of the same: kernels, engines, compilers, precisions."""

from __future__ import annotations

import math
from typing import Any

import tiny
from gpu.runs import LENGTHS, compared, config, llama, need, rows, sft, use_kernel

COEFFICIENT = 0.5
ARRANGEMENTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "padding_free": {"padding_free": True},
    "packing": {"packing": True, "eval_packing": False},
}


def flattened(folder: str, device: str, **settings: str) -> dict[str, Any]:
    """Compare a flattened or packed batch with the padded one: ``attention``, ``dtype``, ``how``."""
    attention, dtype, how = settings["attention"], settings["dtype"], settings["how"]
    kernel = use_kernel(dtype) if attention == "flash" else attention
    # The batch with padding is the one that no kernel and no patch touches.
    padded = sft(folder, device, llama(folder, "sdpa", dtype), dtype)
    flat = sft(folder, device, llama(folder, attention, dtype), dtype, **ARRANGEMENTS[how])
    return {
        **compared(flat, padded),
        "kernel": kernel,
        "tokens": flat["tokens"],
        "tokens when padded": padded["tokens"],
    }


def compiled(folder: str, device: str, how: str, tf32: str) -> dict[str, Any]:
    """Compare the step of a compiled model, and that of the eager one, with the same step in float64.

    ``how`` is the arrangement of the batch. ``tf32`` is 1 if matrices may be multiplied in TF32, which keeps 10 bits.
    """
    backend = "inductor" if device == "cuda" else "aot_eager"
    arrangement = {**ARRANGEMENTS[how], "tf32": bool(int(tf32)) if device == "cuda" else None}
    exact = sft(folder, device, llama(folder, "sdpa", "float64"), "float64", **arrangement)
    answer: dict[str, Any] = {"backend": backend}
    for name, compiling in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": backend})):
        step = sft(folder, device, llama(folder, "sdpa", "float32"), "float32", **arrangement, **compiling)
        answer |= {f"{name} {key}": value for key, value in compared(step, exact).items()}
    return answer


def zero(folder: str, device: str, stage: str, dtype: str) -> dict[str, Any]:
    """Measure how much of the auxiliary term is in the loss of a mixture of experts under ZeRO: 1 is right."""
    from trl import DPOConfig, DPOTrainer

    engine = tiny.deepspeed(int(stage))
    if dtype == "bfloat16":
        engine["bf16"] = {"enabled": True}
    trainer_class = tiny.measured(tiny.one_group(DPOTrainer))
    policy, reference = (tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT) for _ in range(2))
    aux_losses: list[float] = []
    policy.register_forward_hook(lambda model, args, outputs: aux_losses.append(float(outputs.aux_loss)))
    lengths = {"max_length": 16, "max_prompt_length": 8}
    trainer = tiny.trainer(
        trainer_class,
        model=policy,
        ref_model=reference,
        args=config(DPOConfig, device, dtype, deepspeed=engine, **lengths),
        train_dataset=tiny.preferences(),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    # Policy and reference have the same weights, so that the rest of the loss is log 2.
    term = trainer.losses[0] - math.log(2)
    return {"share": term / (COEFFICIENT * aux_losses[0]), "wrapped_as": type(trainer.model_wrapped).__name__}


def precomputed(folder: str, device: str, dtype: str) -> dict[str, float]:
    """Compare the loss of a second step whose reference is precomputed with that of one whose reference is a model."""
    from trl import DPOConfig, DPOTrainer

    def last_loss(**given: Any) -> float:
        lengths = {"max_length": 16, "max_prompt_length": 8}
        trainer = tiny.trainer(
            tiny.measured(DPOTrainer),
            model=llama(folder, "sdpa", "float32"),
            args=config(
                DPOConfig,
                device,
                dtype,
                max_steps=2,
                optim="sgd",
                learning_rate=0.05,
                precompute_ref_log_probs=not given,
                **lengths,
            ),
            train_dataset=tiny.preferences(),
            tokenizer=tiny.tokenizer(),
            **given,
        )
        trainer.train()
        return float(trainer.losses[-1])

    measured, expected = last_loss(), last_loss(ref_model=llama(folder, "sdpa", "float32"))
    return {
        "loss": abs(measured - expected) / abs(expected),
        # Is the policy its own reference?
        "moved": abs(measured - math.log(2)),
        "expected to move": abs(expected - math.log(2)),
    }


def liger_sft(folder: str, device: str, dtype: str) -> dict[str, Any]:
    """Compare Liger's fused cross-entropy, in Triton, with that of transformers."""
    need("liger_kernel")
    plain = sft(folder, device, llama(folder, "sdpa", dtype), dtype)
    fused = sft(folder, device, llama(folder, "sdpa", dtype), dtype, use_liger_kernel=True)
    return compared(fused, plain)


def liger_dpo(folder: str, device: str, dtype: str) -> dict[str, Any]:
    """Compare Liger's DPO loss of flattened batches with TRL's of padded ones."""
    from trl import DPOConfig, DPOTrainer

    from tiny.data import preferences_of_several_lengths

    need("liger_kernel")

    def run(**settings: Any) -> dict[str, Any]:
        pairs = preferences_of_several_lengths()
        lengths = {"max_length": 32, "max_prompt_length": 16, "per_device_train_batch_size": 4}
        trainer = tiny.trainer(
            tiny.measured(DPOTrainer),
            model=llama(folder, "sdpa", dtype),
            ref_model=llama(folder, "sdpa", dtype, seed=1),
            args=config(DPOConfig, device, dtype, learning_rate=0.0, **lengths, **settings),
            train_dataset=pairs,
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
        gradients = {name: value.double().cpu() for name, value in trainer.step.gradients.items()}
        return {"loss": trainer.losses[0], "gradients": gradients, "rows": 0}

    plain = run()
    # Older and newer releases name this argument differently.
    fused = run(padding_free=True, use_liger_loss=True, use_liger_kernel=True)
    return compared(fused, plain)


def fused_head(folder: str, device: str, dtype: str) -> dict[str, Any]:
    """Compare TRL's own LM head, in Triton, with the logits of the model."""
    import torch

    model = llama(folder, "sdpa", dtype)
    fused = sft(folder, device, model, dtype)
    plain = llama(folder, "sdpa", dtype).to(device)
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows(LENGTHS)], batch_first=True).to(device)
    place = torch.arange(ids.shape[1], device=device)[None]
    is_token = place < torch.tensor(LENGTHS, device=device)[:, None]
    logits = plain(input_ids=ids, attention_mask=is_token.long()).logits
    loss = torch.nn.functional.cross_entropy(
        logits[:, :-1].float().flatten(0, 1), ids.masked_fill(~is_token, -100)[:, 1:].flatten(), reduction="sum"
    )
    loss.backward()
    gradients = {name: value.grad.double().cpu() for name, value in plain.named_parameters() if value.grad is not None}
    return compared(fused, {"loss": float(loss.detach()), "gradients": gradients, "rows": 0})
