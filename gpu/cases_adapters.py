"""Models in 4 bits, by bitsandbytes, and the base model beside vLLM."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
from gpu.runs import LENGTHS, config, llama, need, rows


def _quantised(folder: str, device: str) -> tuple[Any, Any]:
    """Return a Llama in 4 bits, from disk, and the config that loads it."""
    import torch

    need("bitsandbytes")
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


def dora(folder: str, device: str) -> dict[str, Any]:
    """Count the magnitude vectors of DoRA on a model in 4 bits that two small steps in bf16 change."""
    from datasets import Dataset
    from peft import get_peft_model
    from trl import SFTConfig, SFTTrainer

    adapter = tiny.lora()
    adapter.use_dora = True
    model = get_peft_model(_quantised(folder, device)[0], adapter)
    trainer = tiny.trainer(
        SFTTrainer,
        model=model,
        args=config(SFTConfig, device, "bfloat16", max_steps=2, learning_rate=1e-5, max_length=64),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in rows(LENGTHS)]),
        tokenizer=tiny.tokenizer(),
    )
    magnitudes = {name: value for name, value in model.named_parameters() if "lora_magnitude_vector" in name}
    before = {name: value.detach().float().clone() for name, value in magnitudes.items()}
    trainer.train()
    moved = sum(bool((value.detach().float() != before[name]).any()) for name, value in magnitudes.items())
    return {"magnitudes": len(magnitudes), "moved": moved, "dtype": str(next(iter(magnitudes.values())).dtype)}


def vllm(folder: str, device: str) -> dict[str, Any]:
    """Take two GRPO steps with vLLM in the process, and compare what it samples from with the policy."""
    import torch
    from trl import GRPOConfig, GRPOTrainer

    need("vllm")
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
