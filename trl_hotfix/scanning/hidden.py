"""Trainers that a script makes without a call of their name: by a registry, a class method, or a name as a text."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import NamedTuple

from .bindings import ScriptBindings
from .names import classes, trainer_names
from .scopes import FUNCTIONS, Place, Scope, ScopedExpression, called_name

_KEEPS_NOTHING = frozenset(["add_end_docstrings", "add_start_docstrings", "dataclass", "final", "total_ordering"])
"""Decorators that return the class, and keep it nowhere."""

_LOOKUPS = frozenset(["eval", "exec", "globals", "locals", "vars"])


_NAMING = frozenset(["getLogger", "patch", "setattr"])
"""Functions that get the name of a class, and make nothing of it."""

_DOTTED = re.compile(r"trl\.([\w.]+\.)?[A-Z]\w*Trainer\Z")


class Hidden(NamedTuple):
    """A trainer that may be made at a line. It is the empty string if the text does not name it."""

    line: int
    trainer: str


def hidden_trainers(script: ScriptBindings) -> Iterator[Hidden]:
    """Yield what hides a trainer. ``trainer_calls`` comes before."""
    has_trainer = "trl" in script.module.star_imports
    for scope in (script.module, *script.scopes.values()):
        for name, bindings in script.budget.counted(scope.bindings.items()):
            for binding in bindings:
                if isinstance(binding.definition, ast.ClassDef):
                    yield from _of_class(script, scope, name, binding.definition)
                has_trainer = has_trainer or (binding.dotted.startswith("trl.") and name.endswith("Trainer"))
    yield from (Hidden(place.line, "") for place in script.budget.counted(script.texts) if _names_trainer(place))
    if has_trainer:
        yield from (Hidden(place.line, "") for place in script.calls if _looks_up(place))


def _of_class(script: ScriptBindings, scope: Scope, name: str, definition: ast.ClassDef) -> Iterator[Hidden]:
    """Yield a class that something else may keep, and the calls of ``cls()`` in its class methods."""
    bases = [ScopedExpression(base, scope, definition.lineno) for base in definition.bases]
    trainers = [trainer for base in bases for trainer in trainer_names(base)]
    if not trainers:
        return
    trainer = trainers[0].rpartition(".")[2]
    if _is_kept(definition, bases) and not _is_followed(script, scope, name):
        yield Hidden(definition.lineno, trainer)
    for method in definition.body:
        if isinstance(method, FUNCTIONS) and method.args.args and _decorators(method) & {"classmethod"}:
            own = method.args.args[0].arg
            for node in script.budget.counted(ast.walk(method)):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == own:
                    yield Hidden(node.lineno, trainer)


def _is_kept(definition: ast.ClassDef, bases: list[ScopedExpression]) -> bool:
    """May a decorator, a metaclass or ``__init_subclass__`` of a base class keep the class?"""
    own = [base for expression in bases for _, base in classes(expression) if base is not None]
    return bool(
        definition.keywords
        or _decorators(definition) - _KEEPS_NOTHING
        or any(isinstance(node, FUNCTIONS) and node.name == "__init_subclass__" for base in own for node in base.body)
    )


def _decorators(definition: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    nodes = [node.func if isinstance(node, ast.Call) else node for node in definition.decorator_list]
    return {called_name(node).rpartition(".")[2] for node in nodes}


def _is_followed(script: ScriptBindings, scope: Scope, name: str) -> bool:
    """Does a call of the class make a trainer that the scan judges?"""
    return any(place.node in script.followed for place in script.budget.counted(scope.uses.get(name, ())))


def _names_trainer(place: Place) -> bool:
    """Is it a text by which code may look up the class: ``"trl.SFTTrainer"``, or that of ``sys.modules["trl"]``?"""
    text, parent = getattr(place.node, "value", ""), place.parent.node if place.parent is not None else None
    if isinstance(parent, ast.Subscript) and text.split(".")[0] == "trl":
        return called_name(parent.value).rpartition(".")[2] == "modules"
    if _DOTTED.match(text) is None:
        return False
    return not (isinstance(parent, ast.Call) and called_name(parent.func).rpartition(".")[2] in _NAMING)


def _looks_up(place: Place) -> bool:
    """Does a call look up a name by a text: ``globals()[f"{kind}Trainer"]`` or ``eval(name)``?"""
    call = place.node
    assert isinstance(call, ast.Call)
    name = called_name(call.func)
    if name not in _LOOKUPS or place.scope.owner(name) is not None:
        return False
    if name in ("eval", "exec"):
        text = call.args[0] if call.args else None
        return not isinstance(text, ast.Constant) or "Trainer" in str(text.value)
    parent = place.parent.node if place.parent is not None else None
    is_stored = isinstance(parent, ast.Subscript) and not isinstance(parent.ctx, ast.Load)
    return not call.args and isinstance(parent, (ast.Subscript, ast.Attribute)) and not is_stored
