"""What a call calls in the end: through names, ``partial``, ``cast``, a dict, ``getattr`` and a function."""

from __future__ import annotations

import ast
from typing import NamedTuple

from .names import dotted_name, returned
from .scopes import ScopedExpression, called_name
from .uses import changes_of

_MOST_STEPS = 40


class Target(NamedTuple):
    """What is called. ``partials`` are the calls of ``partial`` on the way, the innermost first.

    ``passed`` has the nodes of the script that lead to it.
    """

    function: ScopedExpression
    partials: list[ScopedExpression]
    passed: set[ast.AST]


def target(function: ScopedExpression) -> Target:
    """Follow what is called, as far as the text tells."""
    found = Target(function, [], set())
    for _ in range(_MOST_STEPS):
        node = found.function.node
        found.passed.add(node)
        step = _step(found)
        if step is None or step.node in found.passed:
            break
        found = found._replace(function=step)
        if isinstance(node, ast.Call) and is_partial(found.function.with_node(node.func)):
            found.partials.insert(0, function.with_node(node))
        function = step
    return found


def _step(found: Target) -> ScopedExpression | None:
    expression, node = found.function, found.function.node
    if isinstance(node, ast.Name):
        return _value(expression)
    if isinstance(node, ast.Subscript):
        return _element(expression, node.value, node.slice, found.passed)
    if not isinstance(node, ast.Call):
        return None
    if is_partial(expression.with_node(node.func)):
        starred = any(isinstance(argument, ast.Starred) for argument in node.args[:1])
        return expression.with_node(node.args[0]) if node.args and not starred else None
    if is_cast(expression.with_node(node.func)) and len(node.args) == 2:
        return expression.with_node(node.args[1])
    name = asked_name(node)
    if name is not None:
        attribute = ast.Attribute(node.args[0], name, ast.Load())
        return expression.with_node(ast.copy_location(attribute, node))
    if isinstance(node.func, ast.Attribute) and node.func.attr == "get" and len(node.args) == 1:
        return _element(expression, node.func.value, node.args[0], found.passed)
    result = returned(expression)
    if result is not None:
        found.passed.add(node.func)
    return result


def _value(expression: ScopedExpression) -> ScopedExpression | None:
    name = expression.node
    bound = expression.find(name) if isinstance(name, ast.Name) else None
    return bound.value() if bound is not None else None


def _element(
    expression: ScopedExpression, owner: ast.expr, key: ast.expr, passed: set[ast.AST]
) -> ScopedExpression | None:
    """Return ``value`` of ``{"key": value}["key"]``, where the dict may have a name and is not changed."""
    options = expression.with_node(owner)
    on_the_way: set[ast.AST] = set()
    for _ in range(_MOST_STEPS):
        on_the_way.add(options.node)
        value = _value(options)
        if value is None:
            break
        options = value
    node = options.node
    if not isinstance(node, ast.Dict) or not isinstance(key, ast.Constant):
        return None
    if None in node.keys or changes_of(expression.with_node(owner)).changes:
        return None
    passed |= on_the_way
    keys = [name.value if isinstance(name, ast.Constant) else ... for name in node.keys]
    if ... in keys:
        return None
    element = dict(zip(keys, node.values, strict=True)).get(key.value)
    return options.with_node(element) if element is not None else None


def is_partial(function: ScopedExpression) -> bool:
    """Is it ``functools.partial``?"""
    return dotted_name(function) == "functools.partial"


def is_cast(function: ScopedExpression) -> bool:
    """Is it ``typing.cast``, which returns its second argument?"""
    return dotted_name(function) == "typing.cast"


def asked_name(call: ast.Call) -> str | None:
    """Return the name in ``getattr(x, "name")``."""
    if called_name(call.func) != "getattr" or len(call.args) < 2 or not isinstance(call.args[1], ast.Constant):
        return None
    name = call.args[1].value
    return name if isinstance(name, str) else None
