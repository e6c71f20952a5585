"""Wrappers on the methods of a made-up class, each as the layer of a patch of its own."""

from __future__ import annotations

from typing import Any

from trl_hotfix.patching.breaker import Breaker
from trl_hotfix.patching.wrappers import Layer, wrapped_descriptor
from trl_hotfix.witness import Counts


class Methods:
    """What has no instance."""

    @classmethod
    def klass(cls, batch: Any = None) -> Any:
        return batch

    @staticmethod
    def static(batch: Any = None) -> Any:
        return batch


def owner_of(trainer: type) -> Any:
    """Return a class of its own to put wrappers on, with the methods of ``trainer`` and these."""
    return type("Trainer", (trainer,), {**vars(Methods), **vars(trainer)})


def put_on(
    owner: type, name: str, *wrappers: Any, armed: bool = True, strict: bool = True, traced: bool = False
) -> tuple[Counts, ...]:
    """Put these wrappers on a method, the last one outermost. Return the counts of each."""
    layers = tuple(Layer(f"patch-{number}", 1, wrapper, traced) for number, wrapper in enumerate(wrappers))
    for layer in layers:
        layer.armed, layer.breaker = armed, Breaker(layer.patch_id, lambda: strict)
    setattr(owner, name, wrapped_descriptor(vars(owner)[name], layers, owner, (owner.__module__, name)))
    return tuple(layer.counts for layer in layers)
