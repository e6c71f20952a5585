"""Callbacks for the import hooks."""

from __future__ import annotations

from types import ModuleType

PREFIX = "hook_"


class Calls(list[ModuleType]):
    """A callback that keeps the modules it was called with."""

    def __call__(self, module: ModuleType) -> None:
        self.append(module)


class Failing:
    """A callback that raises until ``well`` is set."""

    def __init__(self) -> None:
        self.well, self.calls = False, 0

    def __call__(self, *modules: ModuleType) -> None:
        self.calls += 1
        if not self.well:
            raise RuntimeError("strict")


def patch_value(module: ModuleType) -> None:
    module.value = "patched"
