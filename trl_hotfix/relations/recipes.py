"""How a trainer of TRL is made for a setting, in every release: names by what the release has."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from . import materials, stand_ins
from .making import made
from .setting import HELD_OUT, CannotBeAskedError, Setting

Make = Callable[[Setting, Path], Any]
"""``make(setting, folder)`` returns a trainer. ``folder`` is for its output."""


@dataclass(frozen=True)
class Recipe:
    """What a trainer is made of, and which of its options are neutral.

    ``trainers`` are its names in TRL, the first of them that a release has, in ``package`` of ``trl.experimental`` or
    in TRL itself. ``rows`` is the kind of its dataset, ``rows_with`` the kind that an option needs, and ``side`` where
    its tokenizer pads. It asks for ``answers`` to a prompt at a time; ``generates``: a batch has a group of them.
    A ``"function"`` or a ``"model"`` is ``rewarding`` them. ``options`` are fields of its config, and ``callback``
    makes the one that it is made for.

    ``neutral`` are options that change nothing at this value, ``fresh`` the numbers that a first step logs with an
    adapter that adds nothing, and ``agree_on_equal_lengths`` two values of an option that agree there. ``variants``
    are options with which it computes another loss, and ``least`` the rows that a batch must have.
    """

    name: str
    rows: str
    trainers: tuple[str, ...] = ()
    package: str = ""
    rows_with: Mapping[str, str] = field(default_factory=dict)
    side: str = "right"
    second_model: str = ""
    labels: int = 0
    answers: int = 0
    generates: bool = False
    rewarding: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    callback: Callable[[], Any] | None = None
    neutral: tuple[tuple[str, Any], ...] = ()
    fresh: Mapping[str, float] = field(default_factory=dict)
    agree_on_equal_lengths: tuple[tuple[str, str, str], ...] = ()
    variants: tuple[Mapping[str, Any], ...] = ()
    least: int = 1

    def classes(self) -> tuple[Any, Any]:
        """Return the trainer and its config in the installed TRL. Raises ``CannotBeAskedError`` without one."""
        package = f"trl.experimental.{self.package or self.name.lower()}"
        for trainer in self.trainers or (self.name,):
            # A package of its own is another trainer than the one with this name in TRL.
            for module in (package,) if self.package and self.trainers else (package, "trl"):
                trainer_class = _found(module, f"{trainer}Trainer")
                if trainer_class is not None:
                    config_class = _found(module, f"{trainer}Config") or _found("trl", f"{trainer}Config")
                    return trainer_class, config_class
        raise CannotBeAskedError(f"this TRL has no {self.name}Trainer")

    def make(self, setting: Setting, folder: Path, trainer_class: Any = None) -> Any:
        """Return a trainer, or one of a subclass that takes the same arguments."""
        own_class, config_class = self.classes()
        trainer_class = trainer_class or own_class
        if not hasattr(trainer_class, "train"):
            raise CannotBeAskedError(f"{trainer_class.__name__} of this TRL has no train method")
        taken = parameters(trainer_class)
        # Trainers with a loop of their own take tokens and a reward model.
        has_own_loop = "value_model" in taken or {"policy", "model"} & taken == {"policy"}
        settings = self._settings(setting, folder) | (_of_own_loop(setting) if has_own_loop else {})
        models = self._models(setting, folder.parent, taken, has_own_loop=has_own_loop)
        arguments: dict[str, Any] = {
            **models,
            _first(taken, "args", "config"): config(config_class, settings, setting.arguments),
            "train_dataset": self._rows(setting, taken, setting.order, has_own_loop=has_own_loop),
            _first(taken, "processing_class", "tokenizer"): materials.tokenizer(setting, self.side),
        }
        if has_own_loop:
            arguments["eval_dataset"] = self._rows(setting, taken, HELD_OUT, has_own_loop=has_own_loop)
        if self.callback:
            arguments["callbacks"] = [self.callback()]
        if "group_filter_func" in taken:
            arguments["group_filter_func"] = materials.keep_rewarded
        if {"reward_funcs", "reward_processing_class"} & taken == {"reward_processing_class"}:
            arguments["reward_processing_class"] = materials.tokenizer(setting, self.side)
        if setting.adapter == "config":
            if "peft_config" not in taken:
                raise CannotBeAskedError(f"{trainer_class.__name__} takes no peft_config")
            arguments["peft_config"] = materials.lora(next(iter(models.values())))
        return made(trainer_class, arguments, setting, folder.parent)

    def _settings(self, setting: Setting, folder: Path) -> dict[str, Any]:
        """Return the fields of its config, of all releases."""
        return {
            **PLAIN,
            "output_dir": str(folder),
            "per_device_train_batch_size": setting.batch_size,
            "per_device_eval_batch_size": setting.eval_batch_size,
            "gradient_accumulation_steps": setting.accumulation,
            "pad_to_multiple_of": setting.width if setting.width > 1 else None,
            **self.options,
        }

    def _rows(self, setting: Setting, taken: set[str], order: Any, *, has_own_loop: bool) -> Any:
        kinds = [kind for option, kind in self.rows_with.items() if setting.arguments.get(option)]
        kind = kinds[0] if kinds else self.rows
        # Releases that call it a tokenizer leave it to the user to tokenize pairs for a reward model.
        is_early_reward = self.name == "Reward" and "processing_class" not in taken
        return materials.rows(f"tokenized {kind}" if has_own_loop or is_early_reward else kind, order)

    def _models(self, setting: Setting, folder: Path, taken: set[str], *, has_own_loop: bool) -> dict[str, Any]:
        """Return the model, which is the first, and those that the trainer takes beside it, by parameter."""
        policy = materials.model(folder, setting, labels=self.labels)
        models = {_first(taken, "model", "policy"): policy}
        second = "ref_policy" if "ref_policy" in taken and has_own_loop else self.second_model
        if second:
            is_base = setting.adapter and second == "ref_model"
            models[second] = None if is_base else materials.model(folder, setting, seed=1)
        if self.rewarding:
            is_function = self.rewarding == "function" and "reward_funcs" in taken
            name = _first(taken, "reward_funcs", "reward_model")
            models[name] = materials.reward if is_function else materials.model(folder, setting, seed=2, labels=1)
        if "value_model" in taken:
            models["value_model"] = materials.model(folder, setting, seed=3, labels=1)
        if self.answers:
            table = materials.AnswersFromTable(policy, self.answers, equal_lengths=setting.equal_lengths)
            for model in (policy, models.get(second)):
                if model is not None:
                    model.generate, model.generate_batch = table, stand_ins.Batches(table)
        return models


PLAIN = {
    "max_steps": 3,
    "logging_steps": 1,
    "optim": "sgd",
    "learning_rate": 0.05,
    "lr_scheduler_type": "constant",
    "max_grad_norm": 0.0,
    "report_to": "none",
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "seed": 0,
    "disable_tqdm": True,
    "gradient_checkpointing": False,
}


def _of_own_loop(setting: Setting) -> dict[str, Any]:
    """Return the fields with which an update is a step, as it is elsewhere."""
    steps = setting.arguments.get("max_steps", PLAIN["max_steps"])
    return {
        "total_episodes": steps * setting.batch_size * setting.accumulation,
        "response_length": materials.LONGEST,
        "num_ppo_epochs": 1,
        "num_mini_batches": 1,
        "num_sample_generations": 0,
        "stop_token": "eos",
        "rloo_k": materials.GROUP,
    }


def _found(module_name: str, name: str) -> Any:
    with contextlib.suppress(AttributeError, ImportError):
        return getattr(import_module(module_name), name)
    return None


def _first(taken: set[str], *names: str) -> str:
    """Return the name that a release gives to a parameter: the first of these that it takes."""
    return next(name for name in names if name in taken)


def config(config_class: type, settings: Mapping[str, Any], asked: Mapping[str, Any]) -> Any:
    """Return a config. Settings for which it has no field are left out; what is ``asked`` must have one."""
    fields = {each.name for each in dataclasses.fields(config_class)}
    unknown = sorted(asked.keys() - fields)
    if unknown:
        raise CannotBeAskedError(f"{config_class.__name__} has no {', '.join(unknown)}")
    given = {name: value for name, value in {**settings, **asked}.items() if name in fields}
    # Some releases write into a mapping that they are given, which is the setting's own.
    return config_class(**copy.deepcopy(given))


def parameters(trainer_class: type) -> set[str]:
    """Return what the constructor takes, with what it passes on to those of its bases."""
    names: set[str] = set()
    for base in trainer_class.__mro__:
        if "__init__" in vars(base):
            own = inspect.signature(vars(base)["__init__"]).parameters
            names |= own.keys()
            if not any(each.kind is each.VAR_KEYWORD for each in own.values()):
                break
    return names - {"self", "kwargs"}
