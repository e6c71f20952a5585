"""What a script does with a config of OmegaConf that a name holds: which of its values it may change."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .harmless import changes_nothing, only_looks
from .names import dotted_name
from .parser_texts import bound_to, inner_scope
from .scopes import Place, Scope, ScopedExpression, source_text
from .settings_files import Keys, Settings, is_scalar, nested

_READING = frozenset(
    [
        "create",
        "is_config",
        "is_dict",
        "is_missing",
        "merge",
        "resolve",
        "save",
        "set_readonly",
        "set_struct",
        "to_yaml",
    ]
)
_COPYING = frozenset(["to_container", "to_object"])
_LEAVING = frozenset(
    [*(f"omegaconf.OmegaConf.{name}" for name in (*_READING, *_COPYING)), "copy.deepcopy", "hydra.utils.instantiate"]
)
"""Functions that leave a config as it was, and hand out no part of it."""

_METHODS = frozenset(["clear", "merge_with", "pop", "popitem", "setdefault", "update"])
"""Methods that change a config."""


class Change(NamedTuple):
    """What may set the value at a path, or within it, at a line."""

    path: Keys
    line: int
    text: str

    @property
    def reason(self) -> str:
        return f"{self.text} may set it"

    def touches(self, path: Keys) -> bool:
        """May it set what is at this path?"""
        shared = min(len(path), len(self.path))
        return path[:shared] == self.path[:shared]


def changes(name: str, owner: Scope, above: Keys, settings: Settings) -> list[Change]:
    """Return what may change a config by the uses of a name. ``above``: the path of what the name holds."""
    reader = _Reader(settings)
    reader.read(name, owner, above)
    return reader.found


class _Reader:
    """Reads the uses of a name, and of the names that hold the same object."""

    def __init__(self, settings: Settings) -> None:
        self.found: list[Change] = []
        self._settings = settings
        self._read: set[tuple[str, int]] = set()

    def read(self, name: str, owner: Scope, above: Keys) -> None:
        if (name, id(owner)) in self._read:
            return
        self._read.add((name, id(owner)))
        bindings = owner.bindings.get(name, [])
        if len(bindings) != 1:
            self.found.append(Change((), bindings[-1].line if bindings else 0, f"{name}, assigned more than once,"))
        for use in owner.module.budget.counted(owner.uses.get(name, ())):
            if isinstance(getattr(use.node, "ctx", None), ast.Load):
                self._read_use(use, above)
            elif use.parent is not None and isinstance(use.parent.node, ast.AugAssign):
                self._note((), use)

    def _note(self, path: Keys, place: Place) -> None:
        shown = place
        while shown.parent is not None and isinstance(shown.parent.node, (ast.expr, ast.keyword)):
            shown = shown.parent
        self.found.append(Change(path, place.line, source_text(shown.node)))

    def _read_use(self, use: Place, path: Keys) -> None:
        """Read what stands around ``cfg.trainer.beta``."""
        place = use
        while True:
            parent = place.parent
            assert parent is not None
            key = _key(parent.node, place.node)
            if key is None:
                break
            place, path = parent, (*path, key)
            if not isinstance(getattr(place.node, "ctx", None), ast.Load):
                # ``cfg.__dict__["_content"] = {}`` sets more than one value.
                self._note(() if any(key.startswith("__") for key in path) else path, place)
                return
        node = parent.node
        if isinstance(node, ast.Call) and node.func is place.node:
            self._read_method(parent, node, path)
        elif isinstance(node, ast.Subscript) and node.value is place.node and not isinstance(node.ctx, ast.Load):
            self._note(path, place)
        elif not self._is_value(path, place):
            self._read_part(place, parent, path)

    def _is_value(self, path: Keys, place: Place) -> bool:
        """Is it one value, or none at all? Note what is a method, or an attribute of OmegaConf itself."""
        try:
            return is_scalar(self._settings.at(path))
        except KeyError:
            if any(key.startswith("_") or key in _METHODS for key in path):
                self._note((), place)
            return True

    def _nested(self, path: Keys) -> Iterator[Keys]:
        for key in nested(self._settings.at(path)):
            yield (*path, key)

    def _read_method(self, call: Place, node: ast.Call, path: Keys) -> None:
        """Read ``cfg.trainer.get("beta")``."""
        if not path:
            self._note((), call)
            return
        *owner, method = path
        above = tuple(owner)
        if owner and self._is_value(above, call):
            return
        if method == "get" and node.args and isinstance(node.args[0], ast.Constant):
            inner = (*above, str(node.args[0].value))
            if not self._is_value(inner, call):
                self._note(inner, call)
        elif method in ("items", "values"):
            for inner in self._nested(above):
                self._note(inner, call)
        elif method not in ("copy", "keys"):
            self._note(above, call)

    def _read_part(self, place: Place, parent: Place, path: Keys) -> None:
        """Read where a mapping or a list of the config stands."""
        node = parent.node
        if isinstance(node, ast.keyword) and node.arg is None:
            for inner in self._nested(path):
                self._note(inner, place)
            return
        call = parent.parent if isinstance(node, ast.keyword) else parent
        if call is not None and isinstance(call.node, ast.Call):
            self._read_argument(place, call, call.node, path)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is place.node:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                owner = place.scope.owner(target.id) if isinstance(target, ast.Name) else None
                if owner is None or not isinstance(target, ast.Name):
                    self._note(path, place)
                else:
                    self.read(target.id, owner, path)
        elif not only_looks(place, node) and not (isinstance(node, ast.Return) and _is_made_here(place)):
            self._note(path, place)

    def _read_argument(self, place: Place, call: Place, node: ast.Call, path: Keys) -> None:
        """Read ``f(cfg)``."""
        function = dotted_name(ScopedExpression(node.func, call.scope, call.line)) or ""
        if function in _LEAVING or changes_nothing(node.func):
            return
        if function == "dict":
            for inner in self._nested(path):
                self._note(inner, place)
            return
        inner_of = inner_scope(node, call.scope)
        parameter = next(bound_to(place, call, inner_of), None) if inner_of is not None else None
        if inner_of is None or parameter is None:
            self._note(path, place)
        else:
            self.read(parameter, inner_of, path)


def _is_made_here(place: Place) -> bool:
    """Does the function make the object, so that each call returns another one?"""
    name = place.node
    owner = place.scope.owner(name.id) if isinstance(name, ast.Name) else None
    if owner is None or owner is not place.scope or owner is owner.module or not isinstance(name, ast.Name):
        return False
    return all(isinstance(binding.value, ast.Call) and not binding.argument_at for binding in owner.bindings[name.id])


def _key(node: ast.AST, part: ast.AST) -> str | None:
    """Return the key of ``x.key`` and ``x["key"]``, where ``part`` is ``x``."""
    if isinstance(node, ast.Attribute) and node.value is part:
        return node.attr
    if isinstance(node, ast.Subscript) and node.value is part and isinstance(node.slice, ast.Constant):
        return node.slice.value if isinstance(node.slice.value, str) else None
    return None
