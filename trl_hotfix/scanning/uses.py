"""What a script does with an object that a name holds: which uses may change it, or hand it to code that may.

An object is known only as far as every use of it is known to leave it as it was. So each use that is not on a list of
harmless ones is a change.

The search begins with the uses of a name (``_Collector.add``). For each it looks at the node around it in the syntax
tree (``_changes_by``) and finds one of three: the use is harmless, the use is a change, or the use hands the object on.
Then the search follows the object: to its other names (``_add_alias``, for ``b = a``), into its parts (``by_attribute``
and ``_by_item``, then ``_by_part`` and ``_by_inner_part``, for ``args.options["x"] = 1``), into a dict that keeps it
(``_by_keeping``), or to a trainer that was made with it (``_by_trainer``), whose own uses are then searched in the same
way. So these functions call one another. The search ends because it follows each node and each name once: ``followed``
and ``_aliases`` have those that it has followed.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from .harmless import (
    COPYING_FUNCTIONS,
    COPYING_METHODS,
    PURE_METHODS,
    changes_nothing,
    is_pure_method_of_trainer,
    leaves_arguments_alone,
    looks_at_vars,
    only_looks,
)
from .names import makes_trainer
from .scopes import Place, Scope, ScopedExpression, called_name, source_text

ANY_PART = "*"

MethodTest = Callable[[str], bool]


def _no_method(name: str) -> bool:
    return False


class Change(NamedTuple):
    """A use that may change an object.

    ``part`` is the attribute or the key that is set, None if it may be any; ``inner_part`` the attribute or key of that
    part, if not the part itself is set. ``value`` is what it is set to, if the text tells.
    """

    place: Place
    part: str | None = None
    inner_part: str | None = None
    value: ast.expr | None = None

    @property
    def line(self) -> int:
        return self.place.line

    @property
    def reason(self) -> str:
        node, place = self.place.node, self.place.parent
        while place is not None and not hasattr(place.node, "body"):
            node, place = place.node, place.parent
        return f"{source_text(node)} may set it"


@dataclass(slots=True)
class Changes:
    """The changes of one object. ``handed_out`` has the parts whose objects other code has, "*" for all parts.

    ``calls`` has the calls of its methods that change nothing.
    """

    changes: list[Change] = field(default_factory=list)
    handed_out: dict[str, Change] = field(default_factory=dict)
    calls: list[Place] = field(default_factory=list)

    def of_any(self) -> Change | None:
        """Return a change that may set any part, if there is one."""
        return next((change for change in self.changes if change.part is None), None)

    def by_part(self) -> dict[str, list[Change]]:
        """Return the changes that set a part or something within it, by the part, in the order of the text."""
        parts: dict[str, list[Change]] = {}
        for change in self.changes:
            if change.part is not None:
                parts.setdefault(change.part, []).append(change)
        return {part: sorted(changes, key=lambda change: change.line) for part, changes in parts.items()}

    def within(self, part: str) -> Change | None:
        """Return a change that may set something within the object that ``part`` is."""
        for change in self.changes:
            if change.part is None or (change.part == part and change.inner_part is not None):
                return change
        return self.handed_out.get(part) or self.handed_out.get(ANY_PART)


def changes_of(expression: ScopedExpression, is_pure: MethodTest = _no_method) -> Changes:
    """Return what may change the object that a name holds. Its methods that are ``is_pure`` change nothing.

    An expression that is no name is an object that nothing else holds.
    """
    reader = expression.node
    if not isinstance(reader, ast.Name):
        return Changes()
    collected = _Collector(is_pure, {reader})
    bound = expression.find(reader)
    while bound is not None:
        value = bound.value()
        collected.add(reader.id, bound.scope, bound.binding.line)
        if value is None or not isinstance(value.node, ast.Name) or value.node in collected.followed:
            break
        reader = value.node
        collected.followed.add(reader)
        bound = value.find(reader)
    return collected.changes


def changes_of_result(call: Place, is_pure: MethodTest) -> Changes:
    """Return what may change the object that a call returns."""
    return _changes_of_result(call, is_pure, set())


def _changes_of_result(call: Place, is_pure: MethodTest, followed: set[ast.AST]) -> Changes:
    parent = call.parent
    assert parent is not None
    node = parent.node
    collected = _Collector(is_pure, followed)
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        for target in targets:
            owner = call.scope.owner(target.id) if isinstance(target, ast.Name) else None
            if owner is not None and isinstance(target, ast.Name):
                collected.add(target.id, owner, node.lineno)
            else:
                collected.changes.changes.append(Change(call))
    elif isinstance(node, ast.Attribute):
        collected.changes.changes += collected.by_attribute(parent, node)
    elif not isinstance(node, ast.Expr):
        collected.changes.changes.append(Change(call))
    return collected.changes


class _Collector:
    """The changes of one object, under all of its names.

    ``followed`` has the nodes that the search, or the scan itself, has followed already: they are no changes.
    """

    def __init__(self, is_pure: MethodTest, followed: set[ast.AST]) -> None:
        self.changes = Changes()
        self.followed = followed
        self._is_pure = is_pure
        self._aliases: set[tuple[str, int]] = set()

    def add(self, name: str, owner: Scope, bound_line: int) -> None:
        """Add the changes by uses of a name that was bound at this line of its scope."""
        bindings = owner.module.budget.counted(owner.bindings[name])
        later = [binding.line for binding in bindings if binding.unconditional and binding.line > bound_line]
        last_line = min(later, default=math.inf)
        for use in owner.module.budget.counted(owner.uses.get(name, ())):
            # A use in an inner scope comes at any time.
            in_life = use.scope is not owner or bound_line <= use.line <= last_line
            if in_life and use.node not in self.followed and not _is_before_binding(use, name, bound_line):
                self.changes.changes += self._changes_by(use)

    def _add_alias(self, name: str, scope: Scope) -> list[Change]:
        """Return the changes by all uses of another name of the object. The text does not tell since when it is one."""
        owner = scope.owner(name)
        if owner is None or (name, id(owner)) in self._aliases:
            return []
        self._aliases.add((name, id(owner)))
        uses = owner.module.budget.counted(owner.uses.get(name, ()))
        return [
            change._replace(value=None)
            for use in uses
            if use.node not in self.followed
            for change in self._changes_by(use)
        ]

    def _changes_by(self, use: Place) -> list[Change]:
        parent = use.parent
        assert parent is not None
        node = parent.node
        if isinstance(getattr(use.node, "ctx", None), (ast.Store, ast.Del)):
            return [Change(use)] if isinstance(node, ast.AugAssign) else []
        if isinstance(node, ast.Attribute):
            return self.by_attribute(parent, node)
        if isinstance(node, ast.Subscript) and use.node is node.value:
            return self._by_item(parent, node)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and use.node is node.value:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            return [
                change
                for target in targets
                for change in (self._add_alias(target.id, use.scope) if isinstance(target, ast.Name) else [Change(use)])
            ]
        if isinstance(node, (ast.Call, ast.keyword)):
            return self._by_argument(use, parent)
        if isinstance(node, ast.Dict):
            unpacked = [value for key, value in zip(node.keys, node.values, strict=True) if key is None]
            return self._hand_out(use) if use.node in unpacked else self._by_keeping(parent)
        if isinstance(node, (ast.BinOp, ast.Starred, ast.For, ast.comprehension)):
            return self._hand_out(use)
        return [] if only_looks(use, node) else [Change(use)]

    def _hand_out(self, use: Place, part: str = ANY_PART) -> list[Change]:
        self.changes.handed_out.setdefault(part, Change(use, part))
        return []

    def by_attribute(self, place: Place, attribute: ast.Attribute) -> list[Change]:
        """``args.beta = 1``, ``args.options["x"] = 1``, ``args.update(...)``, ``f(args.options)``."""
        parent, name = place.parent, attribute.attr
        assert parent is not None
        node = parent.node
        if name.startswith("__"):
            return [Change(place)]
        if not isinstance(attribute.ctx, ast.Load):
            return [Change(place, name, value=_assigned_value(node, attribute))]
        if isinstance(node, ast.Call) and node.func is attribute:
            if name in COPYING_METHODS:
                return self._hand_out(place)
            if name in PURE_METHODS or self._is_pure(name):
                self.changes.calls.append(parent)
                return []
            return [Change(place)]
        return self._by_part(place, parent, name)

    def _by_item(self, place: Place, item: ast.Subscript) -> list[Change]:
        """``options["x"] = 1``, ``options["x"].y = 1``, ``f(options["x"])``."""
        key = item.slice.value if isinstance(item.slice, ast.Constant) else None
        if isinstance(key, str) and isinstance(item.ctx, ast.Store) and place.parent is not None:
            return [Change(place, key, value=_assigned_value(place.parent.node, item))]
        if not isinstance(item.ctx, ast.Load):
            return [Change(place)]
        assert place.parent is not None
        return self._by_part(place, place.parent, key if isinstance(key, str) else ANY_PART)

    def _by_part(self, place: Place, parent: Place, name: str) -> list[Change]:
        """``args.options``, in what it stands."""
        node = parent.node
        if isinstance(node, (ast.Attribute, ast.Subscript)) and getattr(node, "value", None) is place.node:
            inner_part = node.attr if isinstance(node, ast.Attribute) else source_text(node.slice).strip("'\"")
            if not isinstance(node.ctx, ast.Load):
                return [Change(place, name, inner_part)]
            return self._by_inner_part(parent, Change(place, name, inner_part))
        return [] if _only_reads(place, parent) else self._hand_out(place, name)

    def _by_inner_part(self, place: Place, change: Change) -> list[Change]:
        """``args.options["x"]``, in what it stands."""
        parent = place.parent
        assert parent is not None
        node = parent.node
        if isinstance(node, ast.Call) and node.func is place.node:
            if change.inner_part in PURE_METHODS:
                return []
            return self._hand_out(place, str(change.part))
        if isinstance(node, (ast.Attribute, ast.Subscript)) and getattr(node, "value", None) is place.node:
            return self._by_inner_part(parent, change) if isinstance(node.ctx, ast.Load) else [change]
        return [] if _only_reads(place, parent) else [change]

    def _by_argument(self, use: Place, place: Place) -> list[Change]:
        """``f(args)``, ``f(x=args)``, ``f(**args)``."""
        keyword = place.node if isinstance(place.node, ast.keyword) else None
        place = place.parent if keyword is not None and place.parent is not None else place
        call = place.node
        if not isinstance(call, ast.Call):
            return [Change(use)]
        function = called_name(call.func)
        name = function.rpartition(".")[2]
        expression = ScopedExpression(call.func, use.scope, use.line)
        if call.func is use.node or leaves_arguments_alone(expression):
            return []
        if makes_trainer(expression):
            return self._by_trainer(place)
        if keyword is not None and keyword.arg is None:
            return self._hand_out(use)
        if function == "dict" and keyword is not None:
            return self._by_keeping(place)
        if name in ("setattr", "__setattr__", "delattr") and call.args and call.args[0] is use.node:
            return [Change(use, _literal_name(call))]
        if function == "vars" and looks_at_vars(place):
            return self._hand_out(use)
        if name == "getattr" and _literal_name(call) is not None:
            return self._hand_out(use, str(_literal_name(call)))
        if name in COPYING_FUNCTIONS and function in (name, f"copy.{name}", f"dataclasses.{name}"):
            return self._hand_out(use)
        return [] if changes_nothing(call.func) else [Change(use)]

    def _by_trainer(self, call: Place) -> list[Change]:
        """``trainer = DPOTrainer(args=args)``, where ``trainer.args`` may be changed later."""
        if call.node in self.followed:
            return []
        self.followed.add(call.node)
        later = _changes_of_result(call, is_pure_method_of_trainer, self.followed)
        if "args" in later.handed_out or ANY_PART in later.handed_out:
            return [Change(call)]
        return [
            Change(change.place, change.inner_part)
            for change in later.changes
            if change.part is None or (change.part == "args" and change.inner_part is not None)
        ]

    def _by_keeping(self, place: Place) -> list[Change]:
        """``options = {"args": args}``: harmless if the dict is only unpacked for a trainer, or changed elsewhere."""
        parent = place.parent
        assert parent is not None
        node = parent.node
        if isinstance(node, ast.keyword) and node.arg is None and parent.parent is not None:
            call = parent.parent
            is_trainer = isinstance(call.node, ast.Call) and makes_trainer(
                ScopedExpression(call.node.func, call.scope, call.line)
            )
            return self._by_trainer(call) if is_trainer else [Change(place)]
        if isinstance(node, ast.Assign) and all(isinstance(target, ast.Name) for target in node.targets):
            kept = _Collector(self._is_pure, self.followed)
            for target in node.targets:
                assert isinstance(target, ast.Name)
                kept.changes.changes += kept._add_alias(target.id, place.scope)
            if kept.changes.of_any() is None and not kept.changes.handed_out:
                # A key of the dict may be set; what a trainer does with the config counts.
                return [change for change in kept.changes.changes if not isinstance(change.place.node, ast.Subscript)]
        return [Change(place)]


def _is_before_binding(use: Place, name: str, bound_line: int) -> bool:
    """Is the use in the statement that binds the name? What is assigned is evaluated first."""
    statement = use.statement.node
    if use.line != bound_line or not isinstance(statement, ast.Assign):
        return False
    return any(isinstance(target, ast.Name) and target.id == name for target in statement.targets)


def _only_reads(place: Place, parent: Place) -> bool:
    """Is the object looked at, or given to a function that changes nothing?"""
    node = parent.node
    call = parent.parent.node if isinstance(node, ast.keyword) and parent.parent is not None else node
    return changes_nothing(call.func) if isinstance(call, ast.Call) else only_looks(place, node)


def _assigned_value(statement: ast.AST, target: ast.expr) -> ast.expr | None:
    if isinstance(statement, ast.Assign) and target in statement.targets:
        return statement.value
    return statement.value if isinstance(statement, ast.AnnAssign) and statement.target is target else None


def _literal_name(call: ast.Call) -> str | None:
    """Return the name in ``setattr(args, "name", value)``."""
    key = call.args[1] if len(call.args) > 1 else None
    if isinstance(key, ast.Constant) and isinstance(key.value, str) and not key.value.startswith("__"):
        return key.value
    return None


def known_value(changes: list[Change], scope: Scope, line: int) -> ScopedExpression | None:
    """Return what the last of the changes of a part has set it to at ``line``, if the text tells.

    It does not if one of them comes later, in another scope, or not each time.
    """
    last = changes[-1]
    if any(change.place.scope is not scope or change.line >= line or change.inner_part for change in changes):
        return None
    if last.value is None or not last.place.unconditional:
        return None
    return ScopedExpression(last.value, scope, last.line)
