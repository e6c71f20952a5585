"""Wrappers on the methods of a made-up class, each as the layer of a patch of its own."""

from __future__ import annotations

from typing import Any

from trl_hotfix.patching.breaker import Breaker
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor
from trl_hotfix.witness import PROCESS, Count, Phase, Witnessed, known


class Methods:
    """What has no instance."""

    @classmethod
    def klass(cls, batch: Any = None) -> Any:
        return batch

    @staticmethod
    def static(batch: Any = None) -> Any:
        return batch


class Counted:
    """The calls of what a layer counts."""

    def __init__(self, witnessed: Witnessed) -> None:
        self.witnessed = witnessed

    def known(self, instance: Any) -> Count | None:
        """Return the calls by ``instance`` apart from any phase, or None if it has never called this."""
        ledger = known(instance)
        return None if ledger is None else ledger.by_phase[Phase.OTHER].counts.get(self.witnessed)

    @property
    def process(self) -> Count:
        return PROCESS.by_phase[Phase.OTHER].counts.get(self.witnessed, Count())


def layer_of(name: str, wrapper: Any, *, traced: bool = False) -> Layer:
    """Return a layer of a patch of its own, which is counted by itself."""
    return Layer(name, 1, wrapper, traced, witnessed=Witnessed(name, "made_up:Trainer.method", 1))


def owner_of(trainer: type) -> Any:
    """Return a class of its own to put wrappers on, with the methods of ``trainer`` and these."""
    return type("Trainer", (trainer,), {**vars(Methods), **vars(trainer)})


def put_on(
    owner: type, name: str, *wrappers: Any, armed: bool = True, strict: bool = True, traced: bool = False
) -> tuple[Counted, ...]:
    """Put these wrappers on a method, the last one outermost. Return the counts of each."""
    layers = tuple(layer_of(f"patch-{number}", wrapper, traced=traced) for number, wrapper in enumerate(wrappers))
    for layer in layers:
        layer.armed, layer.breaker = armed, Breaker(layer.patch_id, lambda: strict)
    setattr(owner, name, wrapped_descriptor(vars(owner)[name], layers, owner, (owner.__module__, name)))
    return tuple(Counted(layer.witnessed) for layer in layers)
