"""Layers on the methods of TRL's trainers that say what a trainer is doing. They are no patch, and change nothing.

A method that TRL's class inherits has one too, on TRL's class. transformers' own class is left as it is.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from types import FunctionType, ModuleType
from typing import Any

from ..model import Patch, Target
from ..witness import Phase
from .breaker import Breaker
from .inheritance import site_of
from .sites import OccupiedError, Site, Sites
from .wrappers import Layer, UnsupportedTargetError

LAYER = "trl-hotfix-phase"
"""The name of the layers. No report has it."""

METHODS = {
    "__init__": Phase.CONSTRUCT,
    "train": Phase.TRAIN,
    "training_step": Phase.STEP,
    "evaluate": Phase.EVALUATE,
    "predict": Phase.EVALUATE,
}

_OTHERS = (
    "trl.trainer.base_trainer",
    "trl.trainer.iterative_sft_trainer",
    "trl.trainer.ppo_trainer",
    "trl.trainer.ppov2_trainer",
    "trl.experimental.a2po.a2po_trainer",
    "trl.experimental.bema_for_ref_model.dpo_trainer",
    "trl.experimental.gfpo.gfpo_trainer",
    "trl.experimental.gmpo.gmpo_trainer",
    "trl.experimental.grpo_with_replay_buffer.grpo_with_replay_buffer_trainer",
    "trl.experimental.gspo_token.grpo_trainer",
    "trl.experimental.iw_opd.iw_opd_trainer",
    "trl.experimental.minillm.minillm_trainer",
    "trl.experimental.papo.papo_trainer",
    "trl.experimental.ppo.ppo_trainer",
    "trl.experimental.sdft.sdft_trainer",
    "trl.experimental.sdpo.sdpo_trainer",
    "trl.experimental.server_distillation.server_distillation_trainer",
    "trl.experimental.ssd.ssd_trainer",
)
"""Modules of trainers that no patch has a target in."""


def modules_of(patches: Iterable[Patch]) -> set[str]:
    """Return the modules whose trainers get the layers."""
    targets = {target.module for patch in patches for target in patch.targets}
    return {module for module in targets if module.endswith("_trainer")}.union(_OTHERS)


def put_on(module: ModuleType, sites: Sites) -> None:
    """Put the layers on the trainers that this module defines. One that a base of TRL has already is enough."""
    for site in sites.with_layer(LAYER):
        if site.is_of_class_before_reload(module):
            sites.forget(site)
    for cls in trainers_of(module):
        for name, phase in METHODS.items():
            site = sites.at(module, Target(module.__name__, f"{cls.__name__}.{name}", ""))
            if site.has(LAYER) or not isinstance(site.original, FunctionType) or _is_on_a_base(cls, name):
                continue
            layer = Layer(LAYER, 1, _never_called, False, breaker=Breaker(LAYER), observe=True, phase=phase)
            # Where other code stands in its place, the events of the callback say what the trainer does.
            with suppress(OccupiedError, UnsupportedTargetError):
                site.put_on(layer)


def take_off(sites: Iterable[Site]) -> None:
    """Take all layers off that can be taken off. What other code has put on stays, and one beneath it."""
    for site in sites:
        with suppress(OccupiedError):
            site.take_off(LAYER)


def trainers_of(module: ModuleType) -> list[type]:
    """Return the classes of trainers that this module defines."""
    base = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if base is None:
        return []
    return [
        cls
        for name, cls in list(vars(module).items())
        if isinstance(cls, type)
        and issubclass(cls, base)
        and (cls.__module__, cls.__qualname__) == (module.__name__, name)
    ]


def _is_on_a_base(cls: type, name: str) -> bool:
    """Return whether ``cls`` inherits a method that has the layer."""
    raw = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)
    site = site_of(raw)
    return name not in vars(cls) and site is not None and site.has(LAYER)


def _never_called(*arguments: Any) -> Any:
    raise NotImplementedError("a layer that says what a trainer does calls TRL's own method")
