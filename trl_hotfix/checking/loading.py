"""What a script loads: models are made small, names of the hub are looked up on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TAKEN: list[str] = []
"""What was made small, in words."""


class NotHereError(Exception):
    """A model, a tokenizer or rows are not on this machine. ``args`` says which option gives them."""


def install(folder: Path, task: dict[str, Any]) -> None:
    """Have what a script loads be small."""
