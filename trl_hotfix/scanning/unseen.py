"""Uses of TRL's trainers, where the text does not show the call that makes one: such a script may train.

A use is followed where it is assigned, kept in a list or a dict, given to ``partial`` or returned. In the end it leads
to a call that is a trainer's, or it makes none, or the scan says that it is uncertain.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .bindings import ScriptBindings
from .budget import REASON
from .found import Unseen
from .harmless import changes_nothing, only_looks
from .hidden import hidden_trainers
from .indirect import asked_name, is_cast, is_partial
from .names import dotted_name, imported_module, is_trainer, trainer_names
from .scopes import FUNCTIONS, Place, Scope, ScopedExpression, called_name

_LOOKING = frozenset(["MagicMock", "Mock", "getsource", "hasattr", "object", "setattr", "signature", "super"])
"""More functions that make nothing of the class that they are given."""

_HOLDERS = (ast.Dict, ast.List, ast.Tuple, ast.Set, ast.IfExp, ast.BoolOp, ast.Starred, ast.NamedExpr, ast.Lambda)
_OTHER_PACKAGES = frozenset(
    ["accelerate", "lightning", "pytorch_lightning", "sentence_transformers", "setfit", "tokenizers", "transformers"]
)
"""Packages that have other trainers than TRL."""

_OF_CONTAINERS = frozenset(["keys"])


class _Use(NamedTuple):
    """A use of the trainer of this name. ``is_kept``: the place has something that keeps it."""

    trainer: str
    place: Place
    is_kept: bool = False


def unseen_trainers(script: ScriptBindings) -> list[Unseen]:
    """Return the first such use of each trainer, in the order of the file. ``trainer_calls`` comes before."""
    return script.budget.ask(
        _Search(script).found, [Unseen(1, f"{REASON}: not all uses of TRL's trainers are followed")]
    )


class _Search:
    def __init__(self, script: ScriptBindings) -> None:
        self._script = script
        self._lines: dict[str, int] = {}
        self._lookups: list[int] = []
        self._others: dict[str, int] = {}
        self._dotted: dict[tuple[Scope | None, str], set[str]] = {}
        self._visited: set[ast.AST] = set()

    def found(self) -> list[Unseen]:
        uses = [use for place in self._script.names for use in self._uses_of(place)]
        while uses:
            use = uses.pop()
            if use.place.node not in self._visited:
                self._visited.add(use.place.node)
                self._script.budget.spend()
                uses += self._judge(use)
        for place in self._script.calls:
            self._judge_import(place)
        for line, trainer in hidden_trainers(self._script):
            if trainer:
                self._note(trainer, line)
            else:
                self._lookups.append(line)
        unseen = [
            Unseen(line, f"line {line} uses TRL's {trainer}, and scan cannot see where the script makes one")
            for trainer, line in self._lines.items()
        ]
        unseen += [Unseen(line, f"{name} may be a trainer of TRL") for name, line in self._others.items()]
        if self._lookups:
            line = min(self._lookups)
            reason = f"a name of TRL is looked up at line {line}, and the text does not say which"
            unseen.append(Unseen(line, reason))
        return sorted(unseen)

    def _uses_of(self, place: Place) -> Iterator[_Use]:
        """Yield the use of a trainer that a name is, with its attributes. One of several values may be one."""
        name = place.node
        assert isinstance(name, ast.Name)
        if not isinstance(name.ctx, ast.Load):
            return
        owner = place.scope.owner(name.id)
        known = (owner, name.id)
        if known not in self._dotted:
            self._dotted[known] = self._may_be(name, place, owner)
        for dotted in self._dotted[known]:
            yield from self._uses_within(dotted, place)

    def _may_be(self, name: ast.Name, place: Place, owner: Scope | None) -> set[str]:
        """Return the modules and classes, by their dotted names, that a name may be."""
        if owner is None:
            dotted = dotted_name(ScopedExpression(name, place.scope, place.line))
            return {dotted} if dotted is not None and "." in dotted else set()
        found: set[str] = set()
        for binding in self._script.budget.counted(owner.bindings[name.id]):
            if isinstance(binding.definition, ast.ClassDef):
                bases = [ScopedExpression(base, owner, binding.line) for base in binding.definition.bases]
                found.update(trainer for base in bases for trainer in trainer_names(base))
            elif isinstance(binding.value, ast.Call):
                found.add(imported_module(binding.value) or "")
            else:
                found.add(binding.dotted)
        return found

    def _uses_within(self, dotted: str, place: Place) -> Iterator[_Use]:
        while not is_trainer(dotted):
            parent = place.parent
            if parent is None:
                return
            if dotted.split(".")[0] != "trl":
                self._judge_other(dotted, place, parent)
                return
            if not isinstance(parent.node, ast.Attribute):
                yield from self._looked_up(dotted, place, parent)
                return
            if parent.node.attr == "__dict__":
                self._lookups.append(parent.line)
                return
            dotted, place = f"{dotted}.{parent.node.attr}", parent
        yield _Use(dotted.rpartition(".")[2], place)

    def _judge_other(self, dotted: str, place: Place, parent: Place) -> None:
        """``from mylib import MyTrainer``, if no file of the project has it and it is called."""
        while isinstance(parent.node, ast.Attribute) and parent.parent is not None:
            dotted, place, parent = f"{dotted}.{parent.node.attr}", parent, parent.parent
        package, _, name = dotted.rpartition(".")
        is_called = isinstance(parent.node, ast.Call) and parent.node.func is place.node
        if not package or not is_called or not name.endswith("Trainer") or place.node in self._script.followed:
            return
        beside = self._script.beside
        if package.split(".")[0] not in _OTHER_PACKAGES and (
            beside is None or beside.class_of(dotted, beside.script, set()) is None
        ):
            self._others.setdefault(f"{name} of {package}", place.line)

    def _looked_up(self, module: str, place: Place, parent: Place) -> Iterator[_Use]:
        """``getattr(trl, name)``, ``vars(trl)``, and other calls that get the module."""
        call = parent.node
        if not isinstance(call, ast.Call) or place.node not in call.args or call.func is place.node:
            return
        name = asked_name(call)
        if name is not None:
            if name.endswith("Trainer"):
                yield _Use(name, parent)
        elif called_name(call.func) in ("getattr", "vars") or (module == "trl" and not _makes_nothing(call.func)):
            self._lookups.append(place.line)

    def _judge_import(self, place: Place) -> None:
        """Note ``importlib.import_module(f"trl.{name}")``, and a module of TRL that no name is given."""
        call = place.node
        assert isinstance(call, ast.Call)
        if called_name(call.func).rpartition(".")[2] not in ("import_module", "__import__") or not call.args:
            return
        module = imported_module(call)
        strings = [part.value for part in ast.walk(call.args[0]) if isinstance(part, ast.Constant)]
        of_trl = any(isinstance(text, str) and text.split(".")[0] == "trl" for text in strings)
        is_followed = place.parent is not None and isinstance(place.parent.node, (ast.Assign, ast.Expr))
        if of_trl and (module is None or not is_followed):
            self._lookups.append(place.line)

    def _judge(self, use: _Use) -> list[_Use]:
        """Return the uses that a use leads to, and note it if it may make a trainer."""
        trainer, place, is_kept = use
        parent = place.parent
        if place.node in self._script.followed or parent is None:
            return []
        node = parent.node
        if isinstance(node, _HOLDERS) or (isinstance(node, ast.Subscript) and node.value is place.node):
            return [] if _is_annotation(parent) else [_Use(trainer, parent, True)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is place.node:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [later for target in targets for later in self._later(use, target)]
        if isinstance(node, ast.Return):
            return self._returned(use, parent)
        call = parent.parent.node if isinstance(node, ast.keyword) and parent.parent is not None else node
        if isinstance(call, ast.Call) and call.func is not place.node:
            if _hands_on(call, place):
                return [_Use(trainer, parent, True)]
            return [] if _makes_nothing(call.func) else self._note(trainer, place.line)
        return [] if _is_harmless(place, parent, is_kept) else self._note(trainer, place.line)

    def _note(self, trainer: str, line: int) -> list[_Use]:
        self._lines[trainer] = min(line, self._lines.get(trainer, line))
        return []

    def _later(self, use: _Use, target: ast.expr) -> list[_Use]:
        """Return the uses of the name that a use is assigned to."""
        owner = use.place.scope.owner(target.id) if isinstance(target, ast.Name) else None
        places = owner.uses.get(target.id, []) if owner is not None and isinstance(target, ast.Name) else []
        later = [
            _Use(use.trainer, place, use.is_kept)
            for place in self._script.budget.counted(places)
            if isinstance(getattr(place.node, "ctx", None), ast.Load)
        ]
        return later or self._note(use.trainer, use.place.line)

    def _returned(self, use: _Use, place: Place) -> list[_Use]:
        """Return the uses of the function that returns a trainer's class."""
        function = place.parent
        while function is not None and not isinstance(function.node, FUNCTIONS):
            function = function.parent
        if function is None or not isinstance(function.node, FUNCTIONS):
            return self._note(use.trainer, use.place.line)
        return self._later(_Use(use.trainer, function, True), ast.Name(function.node.name, ast.Load()))


def _hands_on(call: ast.Call, place: Place) -> bool:
    """Is it ``partial(T)``, ``cast(Any, T)`` or ``type("X", (T,), {})``, which stands for the trainer?"""
    function = ScopedExpression(call.func, place.scope, place.line)
    return is_partial(function) or is_cast(function) or (called_name(call.func) == "type" and len(call.args) == 3)


def _makes_nothing(function: ast.expr) -> bool:
    return changes_nothing(function) or called_name(function).rpartition(".")[2] in _LOOKING


def _is_harmless(place: Place, parent: Place, is_kept: bool) -> bool:
    node = parent.node
    if isinstance(node, ast.Attribute):
        return node.attr != "__subclasses__" if not is_kept else node.attr in _OF_CONTAINERS
    return isinstance(node, (ast.ClassDef, ast.Delete)) or only_looks(place, node) or _is_annotation(place)


def _is_annotation(place: Place) -> bool:
    """Is it, or is it a part of, ``x: SFTTrainer``, or the annotation of a function?"""
    while place.parent is not None:
        node, part = place.parent.node, place.node
        if isinstance(node, ast.arg):
            return True
        if isinstance(node, FUNCTIONS):
            return node.returns is part
        if isinstance(node, ast.AnnAssign):
            return node.annotation is part
        if isinstance(node, ast.stmt):
            return False
        place = place.parent
    return False
