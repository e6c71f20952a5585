"""Where an object comes from: through names, parameters and functions of the script, to the call that makes it."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import NamedTuple

from ..catalogue.conditions import Argument
from .names import returned
from .scopes import ScopedExpression
from .uses import Changes, changes_of

_MOST_STEPS = 40

Evaluate = Callable[[ScopedExpression], Argument]
"""``value_of``, which the modules that ``values`` itself uses are given."""


class Origin(NamedTuple):
    """The expression that makes an object, and the names on the way to it. ``first_names`` begin a way of names."""

    expression: ScopedExpression
    names: list[ScopedExpression]
    first_names: list[ScopedExpression]

    def changes(self) -> list[Changes]:
        """Return what may change the object under any of its names."""
        return [changes_of(name) for name in self.first_names]


def origin(expression: ScopedExpression) -> Origin:
    """Follow an object to what makes it. ``a`` of ``a, b = f()`` leads to the call."""
    names: list[ScopedExpression] = []
    first_names: list[ScopedExpression] = []
    was_name = False
    for _ in range(_MOST_STEPS):
        expression.budget.spend()
        step = _step(expression)
        is_name = isinstance(expression.node, ast.Name)
        if is_name:
            names.append(expression)
            first_names += [] if was_name else [expression]
        if step is None:
            break
        was_name, expression = is_name, step
    return Origin(expression, names, first_names)


def _step(expression: ScopedExpression) -> ScopedExpression | None:
    node = expression.node
    if isinstance(node, ast.Name):
        bound = expression.find(node)
        return (bound.value() or bound.whole()) if bound is not None else None
    return returned(expression) if isinstance(node, ast.Call) else None
