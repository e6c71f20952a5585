"""How a trainer is made and run, as data. A relation compares runs of two settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

ROWS = 20
"""The rows of every dataset. With steps of eight rows the last window of an epoch is incomplete."""


@dataclass(frozen=True)
class Setting:
    """One way to make and run a trainer.

    ``arguments`` are fields of the trainer's config. ``order`` are the numbers of the dataset's rows. The tokenizer
    pads on ``padding_side``; empty is the side that the trainer needs. ``width`` is the multiple to which batches are
    padded. ``adapter``: LoRA as a ``PeftModel`` (``"model"``), by ``peft_config`` (``"config"``), or none.
    ``resume_at``: the run is saved at this step, and a new trainer goes on. ``ranks`` are processes, each with batches
    of ``batch_size``. ``equal_lengths``: all completions have the same.
    """

    batch_size: int = 8
    accumulation: int = 1
    arguments: Mapping[str, Any] = field(default_factory=dict)
    order: tuple[int, ...] = tuple(range(ROWS))
    padding_side: str = ""
    width: int = 1
    pad_embedding: float = 0.0
    adapter: str = ""
    resume_at: int = 0
    evaluates: bool = False
    eval_batch_size: int = 4
    ranks: int = 1
    equal_lengths: bool = False

    def but(self, **changes: Any) -> Setting:
        """Return this setting with some fields changed. ``arguments`` are added to those that it has."""
        if "arguments" in changes:
            changes["arguments"] = {**self.arguments, **changes["arguments"]}
        return replace(self, **changes)

    def __str__(self) -> str:
        """Return what is not as in the plain setting, such as ``batch_size=2 accumulation=4``."""
        plain = Setting()
        words = [f"{name}={value}" for name, value in self.arguments.items()]
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("arguments", "order") and value != getattr(plain, each.name):
                words.append(f"{each.name}={value}")
        if self.order != plain.order:
            words.append(f"order={','.join(map(str, self.order[:3]))},...")
        return " ".join(words) or "plain"
