"""Stand-ins for TRL and for what scripts import beside it: a trainer records what it has when it trains.

The configs have the arguments and defaults of the release, those that TRL's classes define; of the others, which are
those of ``TrainingArguments``, a few are known here. A name that neither has is an error, as it is in TRL.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import sys
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import FrameType, ModuleType
from typing import Any

from trl_hotfix.catalogue.conditions import UNSET, Argument, Kind
from trl_hotfix.matching import config_defaults
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.matching.hits import TRAINER_ONLY_ARGUMENTS

from .script_libraries import Library, Made, libraries

_TRAINING_ARGUMENTS: Mapping[str, Any] = {
    "output_dir": None,
    "run_name": None,
    "deepspeed": None,
    "resume_from_checkpoint": None,
    "seed": 42,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "label_smoothing_factor": 0.0,
    "learning_rate": 5e-5,
    "max_steps": -1,
    "num_train_epochs": 3.0,
    "bf16": False,
    "fp16": False,
    "gradient_checkpointing": False,
    "gradient_checkpointing_kwargs": None,
    "use_liger_kernel": False,
    "average_tokens_across_devices": True,
    "remove_unused_columns": True,
    "report_to": None,
}
_FIRST = ("output_dir",)
_POSITIONAL: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(["SFT", "Reward"], ("model", "args", "data_collator", "train_dataset", "eval_dataset")),
    **dict.fromkeys(["GRPO"], ("model", "reward_funcs", "args", "train_dataset", "eval_dataset")),
    **dict.fromkeys(["DPO", "KTO"], ("model", "ref_model", "args")),
}
_ARGUMENTS = {*TRAINER_ONLY_ARGUMENTS, "args", "judge", "tools", "reward_processing_classes"} - {"train"}


@dataclass
class Recorded:
    """A trainer that a script has made at a line of its own: its arguments, and the checkpoints it was resumed from."""

    name: str
    line: int
    arguments: Mapping[str, Any]
    config: Mapping[str, Any]
    given: frozenset[str]
    defaults: Mapping[str, Any]
    callbacks: list[Any]
    resumed: list[Any] = field(default_factory=list)

    def find(self, name: str) -> Argument:
        """Return an argument by the names that conditions have."""
        name, _, part = name.partition(".")
        if name == "train":
            return self._resumed()
        value = self.callbacks if name == "callbacks" else self.arguments.get(name)
        if part:
            value = self.config.get(name) if value is None else value
            return described(_part(value, part))
        if value is not None:
            return described(value)
        if name not in self.config:
            return UNSET
        value = self.config[name]
        if name not in self.given and value == self.defaults.get(name):
            return Argument(Kind.LITERAL, value, is_default=True)
        return described(value)

    def _resumed(self) -> Argument:
        if not self.resumed:
            return Argument(Kind.UNKNOWN, reason="it does not train")
        checkpoints = [checkpoint for checkpoint in self.resumed if checkpoint not in (None, False)]
        return Argument(Kind.LITERAL, checkpoints[0]) if checkpoints else UNSET


def _part(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    return value.made_with.get(name) if isinstance(value, Made) else getattr(value, name, None)


def described(value: Any) -> Argument:
    """Describe a value as the text of a script that has it would, if it told all."""
    value = value.value if isinstance(value, Enum) else value
    if value is None or isinstance(value, (bool, int, float, str)):
        return Argument(Kind.LITERAL, value) if value is not None else UNSET
    if isinstance(value, (list, tuple)):
        parts = [described(part) for part in value]
        if all(part.kind is not Kind.OBJECT for part in parts):
            return Argument(Kind.LITERAL, [part.value for part in parts])
        return Argument(Kind.OBJECT, made_by=tuple(name for part in parts for name in part.made_by))
    bases = [base for base in type(value).__mro__ if base is not object and base is not Made]
    return Argument(Kind.OBJECT, made_by=tuple(f"{base.__module__}.{base.__name__}" for base in bases))


class _Config:
    """The base of all configs."""

    def __new__(cls, *positional: Any, **named: Any) -> Any:
        config: Any = object.__new__(cls)
        # `replace` and a parser name all, and so say nothing of each.
        config.__dict__["_given"] = frozenset(named if len(named) < len(dataclasses.fields(config)) else ())
        return config

    def __post_init__(self) -> None:
        pass

    def set_training(self, **given: Any) -> Any:
        for name, value in given.items():
            setattr(self, name, value)
        return self

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload, no-any-return]


def _config_class(name: str, defaults: Mapping[str, Any]) -> Any:
    names = [*_FIRST, *(name for name in defaults if name not in _FIRST)]
    fields = [(key, _type_of(defaults[key]), _field(defaults[key])) for key in names]
    return dataclasses.make_dataclass(f"{name}Config", fields, bases=(_Config,), namespace={"__module__": "trl"})


def _field(default: Any) -> Any:
    if isinstance(default, (list, dict)):
        return dataclasses.field(default_factory=partial(copy, default))
    return dataclasses.field(default=default)


def _type_of(value: Any) -> Any:
    # Annotations of a parser of dataclasses, as transformers reads them.
    if isinstance(value, list):
        return list[type(value[0])] | None  # type: ignore[misc]
    return str | None if value is None else type(value) if isinstance(value, bool) else type(value) | None


def _default(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except ValueError:
        return None


class Recorder:
    """The stand-ins of a release, as modules by their names. ``trainers`` has those that were made."""

    def __init__(self, release: str, script: str, words: Sequence[str]) -> None:
        self.trainers: list[Recorded] = []
        self._script = script
        trl = Library("trl")
        trl.add(*self._classes(release), *_beside(words))
        self.modules: dict[str, ModuleType] = {**libraries(), "trl": trl, **_submodules(trl)}

    def _classes(self, release: str) -> list[Any]:
        releases = bodies().releases
        classes = []
        for name in ("SFT", "DPO", "GRPO", "KTO", "Reward", "RLOO", "ORPO", "CPO", "GKD", "OnlineDPO"):
            own = config_defaults.defaults(release, name, releases)
            if own is not None:
                defaults = {**_TRAINING_ARGUMENTS, **{key: _default(text) for key, text in own.items()}}
                config = _config_class(name, defaults)
                classes += [config, self._trainer_class(name, config, defaults)]
        return classes

    def _trainer_class(self, name: str, config_class: Any, defaults: Mapping[str, Any]) -> Any:
        recorder = self

        class Trainer:
            def __init__(self, *given: Any, **named: Any) -> None:
                positional = dict(zip(_POSITIONAL.get(name, ("model",)), given, strict=False))
                unexpected = [*(positional.keys() & named.keys()), *(named.keys() - _ARGUMENTS)]
                if unexpected or len(positional) < len(given):
                    raise TypeError(f"{name}Trainer has got {unexpected or given}")
                self._given = {**positional, **named}
                self.args = self._given.get("args") or config_class(output_dir="out")
                self.model = self._given.get("model")
                self._callbacks = list(self._given.get("callbacks") or [])
                self._recorded = self._snapshot(recorder.line_of(sys._getframe(1)), [])
                recorder.trainers.append(self._recorded)

            def _snapshot(self, line: int, resumed: list[Any]) -> Recorded:
                config = {key: value for key, value in vars(self.args).items() if key != "_given"}
                own = getattr(self.args, "_given", frozenset())
                return Recorded(
                    name, line, dict(self._given), config, own, defaults, [*self._callbacks], resumed=resumed
                )

            def add_callback(self, callback: Any) -> None:
                self._callbacks.append(callback() if isinstance(callback, type) else callback)

            def train(self, resume_from_checkpoint: Any = None, **rest: Any) -> None:
                now = self._snapshot(self._recorded.line, [*self._recorded.resumed, resume_from_checkpoint])
                self._recorded.__dict__.update(vars(now))

            def evaluate(self, *given: Any, **named: Any) -> dict[str, float]:
                return {}

            log = save_model = push_to_hub = evaluate

        Trainer.__name__ = Trainer.__qualname__ = f"{name}Trainer"
        Trainer.__module__ = "trl"
        return Trainer

    def line_of(self, frame: FrameType | None) -> int:
        """Return the line of the script that makes a trainer, behind the constructors on the way."""
        while frame is not None:
            if frame.f_code.co_filename == self._script and frame.f_code.co_name != "__init__":
                return frame.f_lineno
            frame = frame.f_back
        return 0


def _submodules(trl: ModuleType) -> dict[str, ModuleType]:
    names = ("sft", "dpo", "grpo", "kto", "gkd", "online_dpo")
    packages = ["trl.trainer", "trl.experimental", *(f"trl.experimental.{name}" for name in names)]
    modules: dict[str, ModuleType] = {}
    for name in [*packages, *(f"trl.trainer.{name}_trainer" for name in names)]:
        modules[name] = module = Library(name)
        module.add(*(value for key, value in vars(trl).items() if isinstance(value, type)))
        parent, _, last = name.rpartition(".")
        setattr(modules.get(parent, trl), last, module)
    return modules


def _beside(words: Sequence[str]) -> list[Any]:
    """Return what TRL has beside its trainers, for a script with this command line."""

    @dataclass
    class ModelConfig:
        model_name_or_path: str | None = None
        use_peft: bool = False

    @dataclass
    class ScriptArguments:
        dataset_name: str | None = None

    class BEMACallback(Made):
        pass

    class TrlParser:
        def __init__(self, types: Any) -> None:
            self._types = list(types) if isinstance(types, (list, tuple)) else [types]

        def parse_args_and_config(self) -> tuple[Any, ...]:
            return _parsed(self._types, words)

    def get_peft_config(config: Any) -> Any:
        from peft import LoraConfig  # The stand-in, which is there when this runs.

        return LoraConfig() if config.use_peft else None

    return [ModelConfig, ScriptArguments, BEMACallback, TrlParser, get_peft_config]


def _parsed(types: list[Any], words: Sequence[str]) -> tuple[Any, ...]:
    """Parse a command line and its config as TRL does, with the parser of transformers."""
    import yaml
    from transformers import HfArgumentParser  # That of transformers itself, in the stand-in.

    parser = HfArgumentParser(types)
    before = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    before.add_argument("--config")
    told, rest = before.parse_known_args(list(words))
    if told.config is not None:
        with open(told.config) as file:  # noqa: PTH123
            parser.set_defaults(**yaml.safe_load(file))
    parsed: tuple[Any, ...] = parser.parse_args_into_dataclasses(args=rest, look_for_args_file=False)
    return parsed
