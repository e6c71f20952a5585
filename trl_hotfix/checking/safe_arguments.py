"""What a config gets in place of what a CPU lacks, or what must not happen in a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .shapes import STALE, STEPS

SET: Mapping[str, Any] = {
    "use_cpu": True,
    "no_cuda": True,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "push_to_hub": False,
    "report_to": "none",
    "use_vllm": False,
    "use_liger_kernel": False,
    "use_liger_loss": False,
    "use_liger": False,
    "torch_compile": False,
    "gradient_checkpointing": False,
    "activation_offloading": False,
    "use_transformers_paged": False,
    "use_transformers_continuous_batching": False,
    "auto_find_batch_size": False,
    "max_steps": STEPS,
    "max_grad_norm": 0.0,
    "weight_decay": 0.0,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "logging_steps": 1,
    "logging_strategy": "steps",
    "save_strategy": "no",
    "eval_strategy": "no",
    "evaluation_strategy": "no",
    "load_best_model_at_end": False,
    "eval_on_start": False,
    "dataloader_num_workers": 0,
    "dataloader_persistent_workers": False,
    "dataloader_pin_memory": False,
    "disable_tqdm": True,
    "log_completions": False,
    "full_determinism": False,
    "skip_memory_metrics": True,
}
"""Fields that have this value, where the class of the config has them."""

LEFT_OUT = frozenset(
    {
        *STALE,
        *("deepspeed", "fsdp", "fsdp_config", "fsdp_min_num_params", "fsdp_transformer_layer_cls_to_wrap"),
        *("torch_compile_backend", "torch_compile_mode", "tf32", "local_rank", "ddp_backend", "accelerator_config"),
        *("warmup_steps", "warmup_ratio", "lr_scheduler_kwargs", "optim_args", "optim_target_modules"),
        *("neftune_noise_alpha", "hub_model_id", "hub_token", "hub_strategy", "resume_from_checkpoint"),
        *("dataloader_prefetch_factor", "dataset_num_proc", "metric_for_best_model", "logging_dir", "eval_steps"),
        *("save_steps", "save_total_limit", "use_ipex", "half_precision_backend", "fp16_opt_level", "fp16_backend"),
        *("gradient_checkpointing_kwargs", "torchdynamo", "past_index", "mp_parameters", "tpu_num_cores"),
        *("vllm_mode", "vllm_server_host", "vllm_server_port", "vllm_gpu_memory_utilization", "no_cuda", "run_name"),
        *("liger_kernel_config", "deepspeed_plugin", "project", "trackio_space_id", "parallelism_config"),
    }
)
"""Fields that get the default of the class."""


def made_safe(arguments: Mapping[str, Any], fields: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return arguments of a config that a CPU can do. ``folder`` is its output."""
    kept = {name: value for name, value in arguments.items() if name not in LEFT_OUT}
    safe = {**kept, **{name: value for name, value in SET.items() if name in fields}}
    # Where both names exist, the older one is a trap.
    if "use_cpu" in fields:
        safe.pop("no_cuda", None)
    if "eval_strategy" in fields:
        safe.pop("evaluation_strategy", None)
    if "output_dir" in fields:
        safe["output_dir"] = folder
    return safe
