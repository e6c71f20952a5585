"""A config of TRL's command line (``trl sft --config x.yaml``), which has the arguments of one trainer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml
from msgspec.structs import replace

from ..catalogue.conditions import UNSET, Argument, Kind
from ..errors import ScriptError
from ..matching.hits import TRAINER_ONLY_ARGUMENTS
from . import told_files, yaml_files
from .budget import literal
from .command_lines import of_text
from .found import TrainerCall

EXPECTED = "a config of TRL's command line, a mapping such as 'packing: true'"

DISTINCTIVE_KEYS: Mapping[str, tuple[str, ...]] = {
    "SFT": ("assistant_only_loss", "completion_only_loss", "dataset_text_field", "eval_packing", "packing"),
    "DPO": ("f_divergence_type", "ld_alpha", "loss_weights", "rpo_alpha", "use_weighting"),
    "GRPO": ("importance_sampling_level", "multi_objective_aggregation", "scale_rewards", "top_entropy_quantile"),
    "KTO": ("desirable_weight", "undesirable_weight"),
    "RLOO": ("rloo_k", "normalize_advantages"),
    "Reward": ("center_rewards_coefficient",),
}
"""Keys of a config that only one trainer of TRL's command line has."""


def read_config(source: bytes, file: str, trainer: str | None) -> TrainerCall:
    """Return the call that the command line would make. ``trainer`` None: the keys decide on the trainer."""
    lines, values = _parse(source, file)
    name = trainer or _trainer_of_keys(values, file)
    uses_peft = values.get("use_peft") is True or str(values.get("use_peft")).lower() == "true"
    evaluates = "eval_strategy" in values and values["eval_strategy"] not in ("no", False, None)

    def argument(dotted: str) -> Argument:
        key, _, part = dotted.partition(".")
        line = lines.get(key)
        if key in ("model", "ref_model", "processing_class", "tokenizer"):
            reason = f"made by trl {name.lower()}, whose script is not in this file"
            return Argument(Kind.UNKNOWN, line=lines.get("model_name_or_path"), reason=reason)
        if key == "train":
            return Argument(
                Kind.UNKNOWN, reason=f"trl {name.lower()} calls train(), and its script is not in this file"
            )
        if key == "peft_config" and uses_peft:
            peft_config = Argument(Kind.OBJECT, line=lines["use_peft"], made_by=("peft.LoraConfig",))
            return peft_config if not part else UNSET
        if key == "eval_dataset" and evaluates:
            return Argument(Kind.OBJECT, line=lines["eval_strategy"], made_by=("datasets.load_dataset",))
        if key in TRAINER_ONLY_ARGUMENTS or key not in values:
            return UNSET
        value = values[key]
        if not part:
            return replace(of_text(value), line=line) if isinstance(value, str) else literal(value, line)
        has_part = isinstance(value, dict) and part in value
        return literal(value[part], line) if has_part else UNSET

    return TrainerCall(name, f"trl {name.lower()}", 1, argument)


def _parse(source: bytes, file: str) -> tuple[dict[str, int], dict[str, Any]]:
    """Return the line and the value of each key."""
    root, values = yaml_files.load(source, file, EXPECTED)
    if not isinstance(root, yaml.MappingNode) or not isinstance(values, dict):
        raise ScriptError(f"{file} has no mapping, but {told_files.kind_of(values)}; expected {EXPECTED}")
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value if isinstance(key.value, str)}
    return lines, {str(key): value for key, value in values.items()}


def _trainer_of_keys(values: Mapping[str, Any], file: str) -> str:
    found_keys = {name: [key for key in keys if key in values] for name, keys in DISTINCTIVE_KEYS.items()}
    trainers = [name for name, keys in found_keys.items() if keys]
    if len(trainers) == 1:
        return trainers[0]
    if not trainers:
        raise ScriptError(f"{file}: its keys do not tell the trainer; name it, as in --trainer DPO")
    listing = "; ".join(f"{', '.join(found_keys[name])} of {name}" for name in trainers)
    raise ScriptError(
        f"{file} has keys of several trainers ({listing}); name the one it is for, as in --trainer {trainers[0]}"
    )
