"""Trainers that the files beside a script make: a script that makes none itself may import them."""

from __future__ import annotations

from pathlib import Path

from .beside import Beside
from .bindings import ScriptBindings
from .found import Unseen
from .imported_files import imported
from .trainer_calls import trainer_calls
from .unseen import unseen_trainers


def imported_trainers(script: ScriptBindings, beside: Beside) -> list[Unseen]:
    """Return the imports from files that make trainers of TRL, or may."""
    return [
        Unseen(line, f"it imports {found.name}, which makes trainers of TRL, or may: scan that file too")
        for line, file in imported(script, beside, beside.script)
        if (found := maker(file, beside, {beside.script})) is not None
    ]


def maker(file: Path, beside: Beside, visited: set[Path]) -> Path | None:
    """Return the file, or one that it imports, which makes trainers of TRL or may."""
    if file in visited:
        return None
    visited.add(file)
    script = beside.bindings(file)
    if script is None:
        return None
    calls, unseen, *_ = trainer_calls(script)
    if calls or unseen or unseen_trainers(script):
        return file
    found = (maker(further, beside, visited) for _, further in imported(script, beside, file))
    return next((one for one in found if one is not None), None)
