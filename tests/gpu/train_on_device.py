"""Run inside one release: one case on a GPU, or on the CPU for a rehearsal.

    python train_on_device.py OUT.json CASE cuda|cpu on|off PATCH... NAME=VALUE...

OUT.json has what the case measured and the versions of what it used, or ``skip``: why the case cannot run here.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trl_hotfix

import tiny
from tiny import flash

PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "flash-attn", "bitsandbytes", "triton")
LENGTHS = (37, 64, 21, 50, 9, 60, 33, 64)
"""Tokens of the sequences of a batch, of different lengths."""

COEFFICIENT = 0.5


class CannotRun(Exception):
    """Why a case cannot run on this machine."""


def config(config_class: type, device: str, dtype: str = "float32", **settings: Any) -> Any:
    """Return a config that trains on ``device`` in ``dtype``."""
    of_device: dict[str, Any] = {
        "use_cpu": device == "cpu",
        "bf16": dtype == "bfloat16",
        "tf32": False if device == "cuda" else None,
    }
    return tiny.config(config_class, **{**of_device, **settings})


def llama(folder: str, attention: str, dtype: str, *, seed: int = 0, **sizes: Any) -> Any:
    """Return a Llama with heads of 64 dimensions, which every kernel takes, in ``dtype``."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    path = Path(folder, f"wide-{seed}")
    if not path.exists():
        torch.manual_seed(seed)
        usual: dict[str, Any] = {
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 256,
        }
        usual |= {"vocab_size": 64, "max_position_embeddings": 32768, "pad_token_id": 0, "bos_token_id": None}
        model = LlamaForCausalLM(LlamaConfig(**{**usual, "eos_token_id": 1, "initializer_range": 0.15, **sizes}))
        model.save_pretrained(path)
    is_flash = attention == "flash"
    model = AutoModelForCausalLM.from_pretrained(
        path, torch_dtype=getattr(torch, dtype), attn_implementation="eager" if is_flash else attention
    )
    if is_flash:
        use_kernel(dtype)
        flash.use(model, flash.FLASH_ATTENTION_2)
    return model


def use_kernel(dtype: str) -> str:
    """Put FlashAttention beneath the models: flash-attn, or torch's own; on a CPU what they compute."""
    import torch

    if not torch.cuda.is_available():
        return "reference"
    if dtype == "float32":
        raise CannotRun("FlashAttention has no float32")
    if importlib.util.find_spec("flash_attn") is not None:
        from flash_attn import flash_attn_varlen_func

        flash.kernel[:] = [flash_attn_varlen_func]
        return "flash-attn"
    if importlib.util.find_spec("torch.nn.attention.varlen") is None:
        raise CannotRun(f"neither flash-attn nor torch's varlen attention is here (torch {torch.__version__})")
    flash.kernel[:] = [torch_varlen]
    return "torch varlen"


def torch_varlen(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    **kwargs: Any,
) -> Any:
    """Call torch's varlen attention with the arguments of flash-attn's."""
    from torch.nn.attention.varlen import varlen_attn

    left, right = window_size
    return varlen_attn(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        scale=softmax_scale,
        window_size=(left, 0 if causal else right),
        enable_gqa=q.shape[1] != k.shape[1],
    )


def rows(lengths: tuple[int, ...]) -> list[list[int]]:
    """Return the token ids of sequences, no two of which are equal."""
    return [[3 + (7 * row + 3 * place + place * place) % 60 for place in range(n)] for row, n in enumerate(lengths)]


def sft(folder: str, device: str, model: Any, dtype: str, **settings: Any) -> dict[str, Any]:
    """Train one step on all rows. Return the loss and the gradients as sums over tokens."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list([{"input_ids": row} for row in rows(LENGTHS)])
    packing = settings.get("packing", False)
    usual: dict[str, Any] = {"per_device_train_batch_size": len(LENGTHS), "learning_rate": 0.0}
    # 1.16.0 wants to be told that it need not cut the rows of a flattened batch.
    usual |= {"max_length": None if settings.get("padding_free") and not packing else max(LENGTHS)}
    trainer = tiny.trainer(
        tiny.measured(SFTTrainer),
        model=model,
        args=config(SFTConfig, device, dtype, **{**usual, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    labels = trainer.batches[0]["labels"]
    tokens = int(trainer.keywords[0].get("num_items_in_batch") or 0) or int((labels[:, 1:] != -100).sum())
    return {
        "loss": trainer.losses[0] * tokens,
        "gradients": {name: value.double().cpu() * tokens for name, value in trainer.step.gradients.items()},
        "rows": len(labels),
    }


def compared(measured: dict[str, Any], expected: dict[str, Any]) -> dict[str, float]:
    """Return the relative difference of the losses, and that of all gradients, as one vector each."""
    pairs = [(value, expected["gradients"][name]) for name, value in measured["gradients"].items()]
    apart = math.sqrt(sum(float((one - other).square().sum()) for one, other in pairs))
    size = math.sqrt(sum(float(other.square().sum()) for _, other in pairs))
    return {
        "loss": abs(measured["loss"] - expected["loss"]) / abs(expected["loss"]),
        "gradient": apart / size,
        "rows": measured["rows"],
    }


def flattened(folder: str, device: str, **settings: str) -> dict[str, Any]:
    """Compare a flattened or packed batch with the padded one: ``attention``, ``dtype``, ``how``."""
    attention, dtype, how = settings["attention"], settings["dtype"], settings["how"]
    kernel = use_kernel(dtype) if attention == "flash" else attention
    given = {"packing": True, "eval_packing": False} if how == "packing" else {"padding_free": True}
    # The batch with padding is the one that no kernel and no patch touches.
    padded = sft(folder, device, llama(folder, "sdpa", dtype), dtype)
    flat = sft(folder, device, llama(folder, attention, dtype), dtype, **given)
    return {**compared(flat, padded), "kernel": kernel}


def compiled(folder: str, device: str, **settings: str) -> dict[str, Any]:
    """Compare a flattened batch of a compiled model with that of the eager one."""
    backend = "inductor" if device == "cuda" else "aot_eager"
    eager, fast = (
        sft(folder, device, llama(folder, "sdpa", "float32"), "float32", padding_free=True, **compiling)
        for compiling in ({}, {"torch_compile": True, "torch_compile_backend": backend})
    )
    return {**compared(fast, eager), "backend": backend}


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


def _quantised(folder: str, device: str) -> tuple[Any, Any]:
    """Return a Llama in 4 bits, from disk, and the config that loads it."""
    import torch

    if importlib.util.find_spec("bitsandbytes") is None:
        raise CannotRun("bitsandbytes does not install here")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    llama(folder, "sdpa", "float32")
    four_bits = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_compute_dtype=torch.bfloat16 if device == "cuda" else None,
    )
    model = AutoModelForCausalLM.from_pretrained(
        Path(folder, "wide-0"), quantization_config=four_bits, device_map={"": 0 if device == "cuda" else "cpu"}
    )
    return model, four_bits


def qlora(folder: str, device: str) -> dict[str, Any]:
    """Count the trained weights of an adapter on a model in 4 bits, and whether they change."""
    from datasets import Dataset
    from peft import get_peft_model
    from trl import SFTConfig, SFTTrainer

    model = get_peft_model(_quantised(folder, device)[0], tiny.lora())
    before = {name: value.detach().clone() for name, value in model.named_parameters() if "lora" in name}
    trainer = tiny.trainer(
        SFTTrainer,
        model=model,
        args=config(SFTConfig, device, gradient_checkpointing=True, max_grad_norm=1.0, max_steps=2, max_length=64),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows(LENGTHS)]),
        tokenizer=tiny.tokenizer(),
    )
    trained = sum(value.requires_grad for value in trainer.model.parameters())
    trainer.train()
    after = dict(trainer.model.named_parameters())
    moved = sum(bool((after[name].detach() != value).any()) for name, value in before.items())
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return {"trained": trained, "moved": moved, "grad_norm": float(norms[0])}


def grpo_qlora(folder: str, device: str) -> dict[str, Any]:
    """Make a GRPO trainer with an adapter on a model in 4 bits. ``error`` is empty if that works."""
    from trl import GRPOConfig, GRPOTrainer

    model, _ = _quantised(folder, device)
    sizes: dict[str, Any] = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    try:
        tiny.trainer(
            GRPOTrainer,
            model=model,
            reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
            args=config(GRPOConfig, device, **sizes),
            train_dataset=tiny.preferences().select_columns(["prompt"]),
            tokenizer=tiny.tokenizer(),
            peft_config=tiny.lora(),
        )
    except ValueError as error:
        return {"error": str(error)[:80]}
    return {"error": ""}


def liger_sft(folder: str, device: str, dtype: str) -> dict[str, Any]:
    """Compare Liger's fused cross-entropy, in Triton, with that of transformers."""
    _need("liger_kernel")
    plain = sft(folder, device, llama(folder, "sdpa", dtype), dtype)
    fused = sft(folder, device, llama(folder, "sdpa", dtype), dtype, use_liger_kernel=True)
    return compared(fused, plain)


def liger_dpo(folder: str, device: str, dtype: str) -> dict[str, Any]:
    """Compare Liger's DPO loss of flattened batches with TRL's of padded ones."""
    from trl import DPOConfig, DPOTrainer

    from tiny.data import preferences_of_several_lengths

    _need("liger_kernel")

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


def cost(folder: str, device: str, tokens: str) -> dict[str, Any]:
    """Measure the time of a step and the peak of memory, of flattened batches of so many tokens."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    count = int(tokens)
    length = max(count // 16, 4)
    # Sequences of half to one and a half times the mean length.
    lengths = [length // 2 + (index * 7919) % max(length, 1) + 1 for index in range(16)]
    times: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            _wait(device)
            self.begin = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            _wait(device)
            times.append(time.perf_counter() - self.begin)

    wide = {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "intermediate_size": 4096}
    dtype = "bfloat16" if device == "cuda" else "float32"
    model = llama(folder, "sdpa", dtype, **(wide if device == "cuda" else {}))
    steps = 8 if device == "cuda" else 2
    trainer = tiny.trainer(
        SFTTrainer,
        model=model,
        args=config(
            SFTConfig,
            device,
            dtype,
            padding_free=True,
            max_length=None,
            max_steps=steps,
            per_device_train_batch_size=len(lengths),
            gradient_checkpointing=device == "cuda",
        ),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows(tuple(lengths))] * steps),
        tokenizer=tiny.tokenizer(),
        callbacks=[Clock()],
    )
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    peak = torch.cuda.max_memory_allocated() / 2**20 if device == "cuda" else None
    # The first steps compile and fill caches.
    return {"tokens": sum(lengths), "seconds": statistics.median(times[len(times) // 2 :]), "MiB": peak}


def vllm(folder: str, device: str) -> dict[str, Any]:
    """Take two GRPO steps with vLLM in the process, and compare what it samples from with the policy."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    _need("vllm")
    model = llama(folder, "sdpa", "bfloat16")
    tiny.tokenizer().save_pretrained(Path(folder, "wide-0"))
    base = {name: value.detach().clone() for name, value in model.named_parameters()}
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "max_steps": 4}
    trainer = tiny.trainer(
        GRPOTrainer,
        model=str(Path(folder, "wide-0")),
        reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
        args=config(
            GRPOConfig,
            device,
            "bfloat16",
            use_vllm=True,
            vllm_mode="colocate",
            vllm_gpu_memory_utilization=0.2,
            learning_rate=1e-2,
            model_init_kwargs={"torch_dtype": "bfloat16"},
            **sizes,
        ),
        train_dataset=tiny.preferences().select_columns(["prompt"]),
        tokenizer=tiny.tokenizer(),
        peft_config=tiny.lora(),
    )
    trainer.train()
    kept = trainer.model.get_base_model().state_dict()
    names = {name.replace(".base_layer", ""): value for name, value in kept.items() if "lora_" not in name}
    changed = sum(not torch.equal(names[name].cpu(), value.cpu().to(names[name].dtype)) for name, value in base.items())
    return {"changed": changed}


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise CannotRun(f"{package} does not install here")


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


CASES: dict[str, Callable[..., dict[str, Any]]] = {
    case.__name__: case
    for case in (
        compiled,
        cost,
        flattened,
        fused_head,
        grpo_qlora,
        liger_dpo,
        liger_sft,
        precomputed,
        qlora,
        vllm,
        zero,
    )
}


def versions() -> dict[str, str]:
    """Return the versions of what a case may use, as far as it is installed."""
    found = {}
    for name in (*PACKAGES, "liger-kernel", "vllm"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def main(out: str, case: str, device: str, switch: str, *given: str) -> None:
    patches = [name for name in given if "=" not in name]
    settings = dict(setting.split("=", 1) for setting in given if "=" in setting)
    if switch == "on":
        trl_hotfix.apply(only=patches, strict=True, unknown_body="try")
    with tempfile.TemporaryDirectory() as folder:
        try:
            answer = {**CASES[case](folder, device, **settings), "versions": versions()}
        except CannotRun as reason:
            answer = {"skip": str(reason)}
    # A NaN is no JSON.
    strict = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in answer.items()
    }
    Path(out).write_text(json.dumps(strict))


if __name__ == "__main__":
    main(*sys.argv[1:])
