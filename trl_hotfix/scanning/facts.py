"""The facts that a user adds to a script: a model's folder, a dataset, and the configs of accelerate and DeepSpeed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..catalogue.conditions import Argument, Kind, Lookup
from ..catalogue.facts import FACTS
from ..errors import ScriptError, plain
from . import told_files, yaml_files
from .dataset_files import dataset_facts
from .model_files import model_facts

_ACCELERATE = "what `accelerate config` writes, with distributed_type or num_processes"
_DEEPSPEED = 'a config of DeepSpeed, a mapping such as \'{"zero_optimization": {"stage": 2}}\''
_TYPES = {"DEEPSPEED": "deepspeed", "FSDP": "fsdp"}

# Functions of TRL and Unsloth that give a tokenizer other tokens are among them, and applying a template is not.
_TOKENS = (
    *("eos_token", "pad_token", ".add_special_tokens(", "setup_chat_format", "clone_chat_template"),
    *("chat_template_path", "get_chat_template", "unsloth"),
)
_SAMPLING = ("generation_config", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")

SET_BY: Mapping[str, tuple[str, ...]] = {
    "output_router_logits": ("output_router_logits",),
    "router_loss": ("output_router_logits",),
    "quantized": ("quantiz", "4bit", "8bit", "kbit", "BitsAndBytes", "bnb", "unsloth"),
    "router_aux_loss_coef": ("router_aux_loss_coef",),
    "scales_logits": ("logits_scaling", "lm_head_multiplier", "logit_scale"),
    "labels": ("num_labels", "id2label"),
    "pad_is_eos": _TOKENS,
    "other_ends": (*_TOKENS, "generation_config", "generation_kwargs"),
    "sampling_settings": (*_SAMPLING, "generation_kwargs"),
    "plain_lora": ("get_peft_model", "peft_config", "target_modules", "trainable_token_indices"),
    "adds_bos": ("bos_token", *_TOKENS),
    "conversational": ("dataset_text_field",),
    "plain_text_has_bos": ("dataset_text_field",),
    "named_text_column": ("dataset_text_field",),
    "distributed": ("deepspeed", "fsdp"),
    "zero_stage": ("zero_optimization", "zero_stage"),
    "optimizer_offloaded": ("zero_optimization", "offload_optimizer"),
}
"""Words in a script that may set a fact. Where one stands, the file does not decide."""


def told_facts(
    model: Path | None, accelerate: Path | None, dataset: Path | None = None, deepspeed: Path | None = None
) -> dict[str, Argument]:
    """Return the facts that the files tell. Raises ``ScriptError`` for one that cannot be read.

    A config of DeepSpeed comes before what that of accelerate says of DeepSpeed.
    """
    of_model = model_facts(model) if model is not None else {}
    of_dataset = dataset_facts(dataset) if dataset is not None else {}
    of_accelerate = _launch_facts(accelerate) if accelerate is not None else {}
    return of_model | of_dataset | of_accelerate | (_deepspeed_facts(deepspeed) if deepspeed is not None else {})


def facts_for(text: str, told: Mapping[str, Argument]) -> Lookup:
    """Return what is known of a script with this text, by the names of the facts."""

    def fact(name: str) -> Argument:
        # A script with the word deepspeed sets nothing else than a file that says deepspeed.
        said = told[name].value if name in told else None
        word = next((word for word in SET_BY.get(name, ()) if word in text and word != said), None)
        if word is not None and name in told:
            return Argument(Kind.UNKNOWN, reason=f"the script has {word}")
        return told.get(name, Argument(Kind.UNKNOWN, reason=f"not told: {FACTS[name]}"))

    return fact


def _launch_facts(path: Path) -> dict[str, Argument]:
    config = _read(path, "--accelerate", _ACCELERATE)
    if not {"distributed_type", "num_processes"} & config.keys():
        raise ScriptError(f"--accelerate: {plain(str(path))} has neither; expected {_ACCELERATE}")
    file = path.name
    facts = {}
    kind = str(config.get("distributed_type", "NO")).upper()
    # Without a launcher of several processes, transformers may still wrap the model for all GPUs that it sees.
    name = _TYPES.get(kind, "ddp" if kind.startswith("MULTI_") else None)
    if name is not None:
        facts["distributed"] = Argument(Kind.LITERAL, name, reason=file)
    processes = config.get("num_processes")
    if type(processes) is int and processes > 1:
        facts["processes"] = Argument(Kind.LITERAL, processes, reason=file)
    of_deepspeed = config.get("deepspeed_config") if name == "deepspeed" else None
    named = of_deepspeed.get("deepspeed_config_file") if isinstance(of_deepspeed, dict) else None
    if isinstance(named, str):
        # If it only names a config of DeepSpeed that is not here, --deepspeed has to name one.
        return facts | (_deepspeed_facts(Path(named), "--accelerate") if os.path.isfile(named) else {})
    if isinstance(of_deepspeed, dict) and "deepspeed_config_file" not in of_deepspeed:
        stage, device = of_deepspeed.get("zero_stage"), of_deepspeed.get("offload_optimizer_device", "none")
        facts |= _zero_facts(stage, device, file)
    return facts


def _deepspeed_facts(path: Path, option: str = "--deepspeed") -> dict[str, Argument]:
    zero = _read(path, option, _DEEPSPEED).get("zero_optimization", {})
    zero = zero if isinstance(zero, dict) else {}
    offload = zero.get("offload_optimizer") or {}
    device = offload.get("device", "none") if isinstance(offload, dict) else None
    distributed = Argument(Kind.LITERAL, "deepspeed", reason=path.name)
    return {"distributed": distributed, **_zero_facts(zero.get("stage", 0), device, path.name)}


def _zero_facts(stage: Any, device: Any, file: str) -> dict[str, Argument]:
    """Return the facts of ZeRO. A stage that is no number, and a device without a name, give none."""
    facts = {}
    if type(stage) is int:
        facts["zero_stage"] = Argument(Kind.LITERAL, stage, reason=file)
    if isinstance(device, str):
        facts["optimizer_offloaded"] = Argument(Kind.LITERAL, device.lower() != "none", reason=file)
    return facts


def _read(path: Path, option: str, expected: str) -> Mapping[str, Any]:
    file = plain(str(path))
    try:
        _, config = yaml_files.load(told_files.read(path, yaml_files.LARGEST, expected), file, expected)
    except ScriptError as error:
        raise ScriptError(f"{option}: {error}") from None
    if not isinstance(config, dict):
        raise ScriptError(f"{option}: {file} has {told_files.kind_of(config)}; expected {expected}")
    return config
