"""What a command of ``click`` gets: the real one parses the words with the options that the text has."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

import click
from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .argparse_words import MOST_WORDS, PLACE, Parsed
from .argv import change_of_argv
from .budget import literal
from .click_groups import check_calls, group_of, words_of_group
from .names import dotted_name
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import FUNCTIONS, Scope, ScopedExpression, source_text

_TYPES = {"bool": bool, "float": float, "int": int, "str": str}
_LITERAL = frozenset(["count", "default", "flag_value", "is_flag", "multiple", "nargs", "required"])
_OF_HELP = frozenset(["deprecated", "epilog", "help", "hidden", "metavar", "name", "short_help", "show_default"])
_MAKERS: dict[str, type[click.Parameter]] = {"click.option": click.Option, "click.argument": click.Argument}
_MOST_OPTIONS = 200
_MOST_VALUES = 100


def command_of_click(definition: ast.AST, module: Scope, evaluate: Evaluate) -> Parsed | None:
    """Return the arguments of a command; None if it is no command of click. Raises ``UnclearError``."""
    if not isinstance(definition, FUNCTIONS):
        return None
    decorators = [ScopedExpression(node, module, definition.lineno) for node in definition.decorator_list]
    of_group = next((one for one in decorators if group_of(one) is not None), None)
    if of_group is not None:
        words = words_of_group(definition, of_group, module, evaluate)
        return _parsed(definition, [one for one in decorators if one is not of_group], module, evaluate, words)
    if "click.command" not in map(_name, decorators):
        return None
    return _parsed(definition, decorators, module, evaluate, module.words)


def context_of(
    parameters: Sequence[click.Parameter], module: Scope, words: Sequence[str] | None
) -> click.Context | None:
    """Let click parse the words; None without any. Raises ``UnclearError``, and click's own for wrong words."""
    if len(parameters) > _MOST_OPTIONS:
        raise UnclearError(f"the command has more than {_MOST_OPTIONS} options")
    line = change_of_argv(module)
    if line is not None:
        raise UnclearError(f"sys.argv may be changed at line {line}")
    if words is None:
        return None
    if len(words) > MOST_WORDS:
        raise UnclearError(f"the command line has more than {MOST_WORDS} words")
    command = click.Command("script", params=list(parameters), add_help_option=False)
    try:
        return command.make_context("script", list(words))
    except (TypeError, ValueError) as error:
        raise UnclearError(f"click raises {type(error).__name__}") from None


def is_given(name: str, context: click.Context) -> bool:
    """Do the words have a value for this parameter?"""
    return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def told(name: str, context: click.Context, line: int) -> Argument:
    """Return the value of a parameter."""
    value = context.params[name]
    argument = literal(list(value) if isinstance(value, tuple) else value, line)
    is_known = is_given(name, context) and argument.kind is Kind.LITERAL
    return replace(argument, place=PLACE) if is_known else argument


def _parsed(
    definition: ast.FunctionDef | ast.AsyncFunctionDef,
    decorators: Sequence[ScopedExpression],
    module: Scope,
    evaluate: Evaluate,
    words: Sequence[str] | None,
) -> Parsed:
    check_calls(definition, module)
    parameters = [parameter for one in decorators if (parameter := _parameter(one, evaluate)) is not None]
    try:
        context = context_of(parameters, module, words)
    except click.ClickException as error:
        return Parsed({}, refused=error.format_message())
    if context is None:
        untold = {str(one.name): literal(_shown(one.default), definition.lineno) for one in parameters}
        return Parsed({}, untold=untold)
    return Parsed({name: told(name, context, definition.lineno) for name in context.params})


def _shown(default: Any) -> Any:
    return default if isinstance(default, (bool, float, int, str)) else None


def _name(decorator: ScopedExpression) -> str:
    node = decorator.node
    return dotted_name(decorator.with_node(node.func if isinstance(node, ast.Call) else node)) or ""


def _parameter(decorator: ScopedExpression, evaluate: Evaluate) -> click.Parameter | None:
    """Return the option or argument that a decorator adds; None for ``click.command``."""
    call, name = decorator.node, _name(decorator)
    decorator.budget.spend()
    keywords = call.keywords if isinstance(call, ast.Call) else []
    if name == "click.command" and all(keyword.arg in _OF_HELP for keyword in keywords):
        return None
    if name not in _MAKERS or not isinstance(call, ast.Call):
        raise UnclearError(f"{source_text(call)} is not read (line {call.lineno})")
    given = {}
    for keyword in keywords:
        value = decorator.with_node(keyword.value)
        if keyword.arg == "type":
            given["type"] = _type(value, evaluate)
        elif keyword.arg in _LITERAL:
            given[keyword.arg] = literal_of(value, evaluate, keyword.value.lineno)
        elif keyword.arg not in _OF_HELP:
            raise UnclearError(f"the option has {keyword.arg or '**options'} (line {call.lineno})")
    flags = [literal_of(decorator.with_node(flag), evaluate, flag.lineno) for flag in call.args]
    if abs(given["nargs"]) > _MOST_VALUES if isinstance(given.get("nargs"), int) else "nargs" in given:
        raise UnclearError(f"nargs is not read (line {call.lineno})")
    try:
        return _MAKERS[name](flags, **given)
    except (AttributeError, TypeError, ValueError) as error:
        raise UnclearError(f"{name}() raises {type(error).__name__} (line {call.lineno})") from None


def literal_of(expression: ScopedExpression, evaluate: Evaluate, line: int) -> Any:
    """Return the value of a literal. Raises ``UnclearError``, which names ``line``, for anything else."""
    argument = evaluate(expression)
    if argument.kind is not Kind.LITERAL:
        raise UnclearError(f"{source_text(expression.node)} is no literal (line {line})")
    return argument.value


def _type(type_: ScopedExpression, evaluate: Evaluate) -> Any:
    node = type_.node
    if isinstance(node, ast.Name) and node.id in _TYPES and type_.find(node) is None:
        return _TYPES[node.id]
    choice = isinstance(node, ast.Call) and dotted_name(type_.with_node(node.func)) == "click.Choice"
    if choice and isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
        choices = literal_of(type_.with_node(node.args[0]), evaluate, node.args[0].lineno)
        if isinstance(choices, list) and all(isinstance(word, str) for word in choices):
            return click.Choice(choices)
    raise UnclearError(f"type={source_text(node)} is not read (line {node.lineno})")
