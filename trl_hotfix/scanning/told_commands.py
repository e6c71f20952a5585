"""The parameters of a function that click, typer or fire calls with what the command line has."""

from __future__ import annotations

import ast

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .argparse_words import Parsed
from .click_words import command_of_click
from .fire_words import command_of_fire
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import Scope, ScopedExpression, source_text
from .typer_words import command_of_typer
from .uses import changes_of

_COMMANDS = (command_of_click, command_of_typer, command_of_fire)


def command_of(definition: ast.AST, module: Scope, evaluate: Evaluate) -> tuple[Parsed, str] | None:
    """Return the arguments of a command, and why the text does not show them. None if it is no command."""
    known = module.namespaces
    if definition not in known:
        try:
            found = (command(definition, module, evaluate) for command in _COMMANDS)
            parsed = next((one for one in found if one is not None), None)
            known[definition] = (parsed, "") if parsed is not None else None
        except UnclearError as error:
            known[definition] = Parsed({}), str(error)
    answer: tuple[Parsed, str] | None = known[definition]
    return answer


def told_parameter(expression: ScopedExpression, evaluate: Evaluate) -> Argument | None:
    """Return what the parameter of a command gets, or its ``value`` if it takes an enumeration; None for others."""
    node = expression.node
    parameter = node.value if isinstance(node, ast.Attribute) and node.attr == "value" else node
    bound = expression.find(parameter) if isinstance(parameter, ast.Name) else None
    definition = bound.binding.parameter_of if bound is not None and bound.value() is None else None
    command = command_of(definition, expression.scope.module, evaluate) if definition is not None else None
    if command is None:
        return None
    parsed, unclear = command
    name = source_text(node)
    unknown = Argument(Kind.UNKNOWN, line=node.lineno, reason=f"{name} is of the command line")
    unclear = unclear or parsed.refused
    if unclear:
        return replace(unknown, reason=f"{unknown.reason}, and {unclear}")
    if name in parsed.untold:
        default = parsed.untold[name].value
        known = f", with the default {default!r}" if default is not None else ""
        return replace(unknown, reason=f"{unknown.reason}{known}")
    value = parsed.values.get(name, unknown)
    change = next(iter(changes_of(expression).changes), None) if isinstance(value.value, list) else None
    return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason) if change is not None else value
