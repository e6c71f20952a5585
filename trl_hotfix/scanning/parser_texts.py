"""The parser of ``argparse`` that a script makes: the calls that add its options, in the order in which they run."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from .names import dotted_name
from .origins import Origin
from .scopes import Place, Scope, ScopedExpression, source_text

MOST_OPTIONS = 500
_STEPS_OF_OPTION = 5

_GROUPS = frozenset(["add_argument_group", "add_mutually_exclusive_group"])
_ADDING = frozenset(["add_argument", "set_defaults"])
_PARSING = frozenset(["parse_args", "parse_known_args"])
_HARMLESS = _PARSING | {"error", "exit", "format_help", "format_usage", "get_default", "print_help", "print_usage"}


class UnclearError(Exception):
    """The text does not decide what a parser, or its command line, gives. The message is the reason."""


class Step(NamedTuple):
    """A call of ``add_argument``, ``set_defaults`` or one that adds a group. ``group``: that of an earlier step."""

    method: str
    call: ScopedExpression
    group: ast.AST | None


_Order = tuple[tuple[int, int], ...]


def is_parser(expression: ScopedExpression) -> bool:
    """Is it a call of ``argparse.ArgumentParser``?"""
    node = expression.node
    return isinstance(node, ast.Call) and dotted_name(expression.with_node(node.func)) == "argparse.ArgumentParser"


def steps(parser: Origin) -> list[Step]:
    """Return what is done with a parser. Raises ``UnclearError`` if the text may not have all of it."""
    reader = _Reader({name.node for name in parser.names})
    for depth, name in enumerate(parser.names):
        assert isinstance(name.node, ast.Name)
        owner = name.scope.owner(name.node.id)
        if owner is None or (depth and owner is not name.scope):
            raise UnclearError(f"{name.node.id} is a parser of another scope")
        # The names nearest to the call that makes it come first.
        reader.read_name(name.node.id, owner, ((-depth, 0),), None)
    return [step for _, step in sorted(reader.found, key=lambda found: found[0])]


class _Reader:
    """Reads the uses of a parser and its groups. ``followed`` has the names that lead to the parser."""

    def __init__(self, followed: set[ast.expr]) -> None:
        self.found: list[tuple[_Order, Step]] = []
        self._followed: set[ast.AST] = set(followed)
        self._read: set[tuple[str, int]] = set()

    def read_name(self, name: str, owner: Scope, order: _Order, group: ast.AST | None) -> None:
        if (name, id(owner)) in self._read:
            return
        self._read.add((name, id(owner)))
        if len(owner.bindings[name]) > 1:
            raise UnclearError(f"{name} is assigned more than once")
        for use in owner.module.budget.counted(owner.uses.get(name, ())):
            if use.node not in self._followed and isinstance(getattr(use.node, "ctx", None), ast.Load):
                self._read_use(use, use.scope is owner, order, group)

    def _read_use(self, use: Place, in_scope: bool, order: _Order, group: ast.AST | None) -> None:
        """Read ``parser.method(...)`` or ``function_of_the_script(parser)``."""
        parent = use.parent
        assert parent is not None
        node, call = parent.node, parent.parent
        is_method = isinstance(node, ast.Attribute) and call is not None and isinstance(call.node, ast.Call)
        if is_method and call is not None and isinstance(call.node, ast.Call) and call.node.func is node:
            assert isinstance(node, ast.Attribute)
            self._read_method(node.attr, call, in_scope, order, group)
        elif isinstance(node, ast.Call) and in_scope and parent.unconditional:
            self._read_function(node, use, parent, order, group)
        else:
            raise UnclearError(f"{_shown(use)} may change the parser (line {use.line})")

    def _read_method(self, method: str, call: Place, in_scope: bool, order: _Order, group: ast.AST | None) -> None:
        if method in _HARMLESS:
            return
        node = call.node
        assert isinstance(node, ast.Call)
        if method not in _GROUPS | _ADDING:
            raise UnclearError(f"{_shown(call)} is more than add_argument (line {node.lineno})")
        if not (in_scope and call.unconditional):
            raise UnclearError(f"{_shown(call)} may not run, or more than once (line {node.lineno})")
        if len(self.found) >= MOST_OPTIONS:
            raise UnclearError(f"the parser has more than {MOST_OPTIONS} options")
        call.scope.module.budget.spend(_STEPS_OF_OPTION)
        place = (*order, (node.lineno, node.col_offset))
        self.found.append((place, Step(method, ScopedExpression(node, call.scope, node.lineno), group)))
        if method in _GROUPS:
            self._read_group(node, call, order)

    def _read_group(self, node: ast.Call, call: Place, order: _Order) -> None:
        """Read the uses of ``group = parser.add_argument_group()``, or of the call itself."""
        parent = call.parent
        assert parent is not None
        statement = parent.node
        if isinstance(statement, ast.Attribute):
            self._read_use(call, True, order, node)
        elif isinstance(statement, ast.Assign) and [type(target) for target in statement.targets] == [ast.Name]:
            (target,) = statement.targets
            owner = call.scope.owner(target.id) if isinstance(target, ast.Name) else None
            if owner is None or not isinstance(target, ast.Name):
                raise UnclearError(f"{_shown(call)} is not followed (line {node.lineno})")
            self._read_assigned_group(target.id, owner, statement.lineno, order, node)
        elif not isinstance(statement, ast.Expr):
            raise UnclearError(f"{_shown(call)} is not followed (line {node.lineno})")

    def _read_assigned_group(self, name: str, owner: Scope, line: int, order: _Order, group: ast.AST) -> None:
        """Read the uses of a name until it is another group: ``group`` often names one after the other."""
        bindings = owner.bindings[name]
        if any(not binding.unconditional or binding.value is None for binding in bindings):
            raise UnclearError(f"{name} is not assigned once and for all")
        until = min((binding.line for binding in bindings if binding.line > line), default=None)
        for use in owner.module.budget.counted(owner.uses.get(name, ())):
            is_load = isinstance(getattr(use.node, "ctx", None), ast.Load)
            if is_load and line < use.line and (until is None or use.line < until):
                self._read_use(use, use.scope is owner, order, group)
            elif is_load and (use.scope is not owner or use.line in (line, until)):
                raise UnclearError(f"{name} is used where it may be another group (line {use.line})")

    def _read_function(self, node: ast.Call, use: Place, call: Place, order: _Order, group: ast.AST | None) -> None:
        """Read ``add_options(parser)``, if that is a function of the script that is called once."""
        inner = inner_scope(node, call.scope)
        parameter = next(bound_to(use, call, inner), None) if inner is not None else None
        if inner is None or parameter is None:
            raise UnclearError(f"{_shown(call)} may change the parser (line {node.lineno})")
        self.read_name(parameter, inner, (*order, (node.lineno, node.col_offset)), group)


def inner_scope(call: ast.Call, scope: Scope) -> Scope | None:
    bound = scope.find(call.func.id, call.lineno) if isinstance(call.func, ast.Name) else None
    definition = bound.binding.definition if bound is not None else None
    return scope.module.inner.get(definition) if definition is not None else None


def bound_to(use: Place, call: Place, inner: Scope) -> Iterator[str]:
    """Yield the parameter that is given what is used in a call."""
    for name, bindings in inner.bindings.items():
        first = bindings[0]
        if first.value is use.node and first.argument_at is not None and first.argument_at.node is call.node:
            yield name


def _shown(place: Place) -> str:
    node = place.node
    if isinstance(node, ast.Call):
        return f"{source_text(node.func)}()"
    return source_text(place.parent.node if place.parent is not None else node)
