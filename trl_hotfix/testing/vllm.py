"""vLLM generates for GRPO, RLOO and OnlineDPO, and is given their weights: by the trainer, or by ``VLLMGeneration``."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ..authoring import absent
from ..model import Outcome
from .trainers import absent_if_reexported


def class_with_vllm(module: ModuleType, methods: Mapping[str, str], why_absent: str) -> type[Any] | Outcome:
    """Return the first class that this module has of ``methods``, which name the method of each class.

    The outcome is ``absent``, for the reason given, where the module has no such class, or the class no such method.
    It is ``absent`` as well where the module only re-exports the class.
    """
    name = next((name for name in methods if name in vars(module)), "")
    method = getattr(vars(module).get(name), methods.get(name, ""), None)
    if method is None:
        return absent(why_absent)
    holder: type[Any] = vars(module)[name]
    return absent_if_reexported(module, method) or holder
