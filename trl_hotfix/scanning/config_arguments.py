"""The arguments of a trainer's config, such as ``args=DPOConfig(beta=0.2)``."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import NamedTuple

from ..catalogue.conditions import Argument, Kind
from .names import classes, follow
from .scopes import BoundName, Scope, ScopedExpression, source_text
from .values import keyword_arguments, value_of


class LocatedArgument(NamedTuple):
    """An argument, and the expression that sets it, if one does."""

    argument: Argument
    expression: ScopedExpression | None


class ConfigArguments:
    """The config of one trainer call.

    An argument is set by an assignment such as ``args.beta = 0.2``, else by a keyword of the call that makes the
    config, else by the default in a class of the script. ``unknown`` stands for all other arguments, if the text does
    not tell which ones are set.
    """

    def __init__(
        self, config: ScopedExpression | None, call: ast.Call, scope: Scope, class_scopes: Mapping[ast.AST, Scope]
    ) -> None:
        self._config, self._scope, self._line = config, scope, call.lineno
        self._class_scopes = class_scopes
        self._arguments: dict[str, ScopedExpression] = {}
        self.unknown: Argument | None = None
        if config is not None:
            self._read(config)

    def _read(self, config: ScopedExpression) -> None:
        origin = follow(config)
        if isinstance(origin.node, ast.Constant) and origin.node.value is None:
            return
        if isinstance(origin.node, ast.Call) and makes_config(origin):
            for _, definition in classes(origin.with_node(origin.node.func)):
                if definition is not None:
                    self._read_defaults(definition)
            arguments, self.unknown = keyword_arguments(origin.node, origin.scope, origin.line)
            self._arguments.update(arguments)
        else:
            value = value_of(config)
            reason = value.reason or source_text(origin.node)
            self.unknown = Argument(Kind.UNKNOWN, line=value.line or self._line, reason=reason)

    def _read_defaults(self, definition: ast.ClassDef) -> None:
        """Read ``class MyConfig(DPOConfig): padding_free: bool = True``."""
        scope = self._class_scopes[definition]
        for statement in definition.body:
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if statement.value is not None:
                default = ScopedExpression(statement.value, scope, statement.lineno)
                self._arguments.setdefault(statement.target.id, default)

    def locate(self, name: str) -> LocatedArgument | None:
        """Return the argument if the text sets it, to a known value or not; None otherwise."""
        assigned = self._assigned(name)
        if assigned is not None:
            return assigned
        if name not in self._arguments:
            return None
        expression = self._arguments[name]
        return LocatedArgument(value_of(expression), expression)

    def _assigned(self, name: str) -> LocatedArgument | None:
        """Return what ``training_args.name = value`` sets before the trainer is made."""
        if self._config is None or not isinstance(self._config.node, ast.Name):
            return None
        variable = self._config.node.id
        assignments = self._assignments(variable, name)
        if not assignments:
            return None
        last = max(assignments, key=lambda assignment: assignment.binding.line)
        value = last.value()
        repeated_outside = len(assignments) > 1 and last.scope is not self._scope
        if value is None or not last.binding.unconditional or repeated_outside:
            reason = last.binding.reason or f"{variable}.{name} is set in a branch, or more than once"
            return LocatedArgument(Argument(Kind.UNKNOWN, line=last.binding.line, reason=reason), None)
        return LocatedArgument(value_of(value), value)

    def _assignments(self, variable: str, name: str) -> list[BoundName]:
        """Return the assignments of ``variable.name`` that may hold when the trainer is made."""
        bound = self._scope.find(variable, self._line)
        scopes = [self._scope] if bound is None or bound.scope is self._scope else [self._scope, bound.scope]
        config_line = bound.binding.line if bound is not None else 0
        return [
            BoundName(binding, scope)
            for scope in scopes
            for binding in scope.attributes.get((variable, name), ())
            if scope is not self._scope or config_line <= binding.line < self._line
        ]


def makes_config(expression: ScopedExpression) -> bool:
    """Is the expression, or what is assigned to it, a call of a class such as ``DPOConfig``?"""
    origin = follow(expression)
    if not isinstance(origin.node, ast.Call):
        return False
    names = [name for name, _ in classes(origin.with_node(origin.node.func))]
    return any(name.endswith(("Config", "TrainingArguments")) and "." not in name[-7:] for name in names)
