"""Trainers that a script makes through others: a file that it runs, the ``trl`` command, and a config of Hydra."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from .beside import Beside
from .bindings import ScriptBindings
from .budget import REASON
from .found import Unseen
from .imports import maker
from .names import dotted_name
from .scopes import Place, ScopedExpression, called_name

_STARTING = frozenset(
    ["Popen", "call", "check_call", "check_output", "exec", "execv", "execvp", "run", "run_path", "system"]
)
"""Functions that start a file or a command, by their last names."""

_BY_CONFIG = frozenset(f"hydra.utils.{name}" for name in ("call", "get_class", "get_object", "instantiate"))
"""Functions that make what a config names."""

_COMMANDS = frozenset(["dpo", "grpo", "kto", "reward", "rloo", "sft"])
"""Commands of TRL's command line that train."""

_MOST_WORDS = 40


def started_trainers(script: ScriptBindings, beside: Beside) -> list[Unseen]:
    """Return the first call that starts what makes a trainer of TRL, or may."""
    untold = [Unseen(1, f"{REASON}: not all calls that may start another file are followed")]
    return script.budget.ask(lambda: [found for place in script.calls for found in _started(place, beside)][:1], untold)


def _started(place: Place, beside: Beside) -> Iterator[Unseen]:
    call = place.node
    assert isinstance(call, ast.Call)
    function = ScopedExpression(call.func, place.scope, place.line)
    name = called_name(call.func)
    if dotted_name(function) in _BY_CONFIG:
        yield Unseen(place.line, f"{name}() makes what its config names, which may be a trainer of TRL")
    if name.rpartition(".")[2] not in _STARTING:
        return
    nodes = [node for node in function.budget.counted(ast.walk(call)) if isinstance(node, ast.Constant)]
    words = [word for node in nodes if isinstance(node.value, str) for word in node.value.split()[:_MOST_WORDS]]
    for word in function.budget.counted(words):
        file = _file(word, beside)
        if file is not None:
            yield Unseen(place.line, f"it starts {file.name}, which makes trainers of TRL, or may: scan that file too")
    if "trl" in words and _COMMANDS & set(words):
        yield Unseen(place.line, "it starts the command line of TRL: scan the config that it names")


def _file(word: str, beside: Beside) -> Path | None:
    """Return the file beside the script that a word names, or one that it imports, if that makes trainers of TRL."""
    path = Path(word)
    if path.suffix != ".py" or path.is_absolute() or ".." in path.parts:
        return None
    located = beside.file(".".join(path.with_suffix("").parts), beside.script)
    return maker(located[0], beside, {beside.script}) if located is not None and not located[1] else None
