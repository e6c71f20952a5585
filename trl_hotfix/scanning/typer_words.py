"""What a command of ``typer`` gets: click parses the words with the options that typer makes of the function."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import Any

import click

from ..catalogue.conditions import Argument, Kind
from .argparse_words import Parsed
from .click_words import context_of, is_given, told
from .names import dotted_name
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import FUNCTIONS, Place, Scope, ScopedExpression, source_text
from .typer_annotations import Other
from .typer_options import OF_HELP, ParameterReader, TyperParameter, check_keywords

_OF_APP = OF_HELP | {
    *("add_completion", "no_args_is_help", "pretty_exceptions_enable", "pretty_exceptions_short"),
    *("pretty_exceptions_show_locals", "rich_markup_mode", "suggest_commands"),
}
_OF_CALL = frozenset(["prog_name", "standalone_mode"])
_CONTEXT = "typer.Context"


def command_of_typer(definition: ast.AST, module: Scope, evaluate: Evaluate) -> Parsed | None:
    """Return the arguments of a command; None if it is no command of typer. Raises ``UnclearError``."""
    if not isinstance(definition, FUNCTIONS):
        return None
    apps = [app for node in definition.decorator_list if (app := _app(node, definition, module)) is not None]
    is_run = any(map(_is_run, _uses(definition.name, module)))
    if not apps and not is_run:
        return None
    if len(definition.decorator_list) != len(apps) or isinstance(definition, ast.AsyncFunctionDef):
        raise UnclearError(f"{definition.name} has other decorators, or is asynchronous")
    _check_uses(definition, module)
    for app in apps:
        _check_app(app, module)
    signature = definition.args
    if signature.vararg or signature.kwarg or len(apps) + is_run != 1:
        raise UnclearError(f"{definition.name} is more than one command, or has *args")
    return _parsed(definition, module, evaluate)


def _app(decorator: ast.expr, definition: ast.FunctionDef | ast.AsyncFunctionDef, module: Scope) -> ast.Name | None:
    """Return ``app`` of ``@app.command()``, or of ``@app.callback()``, if it is one of typer's."""
    function = decorator.func if isinstance(decorator, ast.Call) else decorator
    if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
        return None
    bound = module.find(function.value.id, definition.lineno)
    made = bound.value() if bound is not None else None
    if made is None or not isinstance(made.node, ast.Call):
        return None
    if dotted_name(made.with_node(made.node.func)) != "typer.Typer":
        return None
    if function.attr != "command" or not isinstance(decorator, ast.Call):
        raise UnclearError(f"{source_text(decorator)} is not read (line {decorator.lineno})")
    check_keywords(made.node, _OF_APP)
    check_keywords(decorator, OF_HELP)
    return function.value


def _uses(name: str, module: Scope) -> Iterator[Place]:
    for use in module.budget.counted(module.uses.get(name, ())):
        if isinstance(getattr(use.node, "ctx", None), ast.Load):
            yield use


def _is_run(use: Place) -> bool:
    """Is it ``main`` of ``typer.run(main)``?"""
    call = use.parent.node if use.parent is not None else None
    if not isinstance(call, ast.Call) or call.args != [use.node] or call.keywords:
        return False
    return dotted_name(ScopedExpression(call.func, use.scope, use.line)) == "typer.run"


def _check_uses(definition: ast.FunctionDef, module: Scope) -> None:
    """Raise ``UnclearError`` if the function may be called with other arguments than those of the command line."""
    name = definition.name
    if [binding.definition for binding in module.bindings.get(name, ())] != [definition]:
        raise UnclearError(f"{name} is no function of the module, or assigned again")
    other = next((use for use in _uses(name, module) if not _is_run(use)), None)
    if other is not None:
        raise UnclearError(f"{name} may be called with other arguments (line {other.line})")


def _check_app(app: ast.Name, module: Scope) -> None:
    """Raise ``UnclearError`` if the app has more than one command, or may be called with other words."""
    if len(module.bindings.get(app.id, ())) != 1:
        raise UnclearError(f"{app.id} is assigned more than once")
    for use in _uses(app.id, module):
        parent = use.parent.node if use.parent is not None else None
        if use.node is app:
            continue
        if isinstance(parent, ast.Attribute) and parent.attr == "command":
            raise UnclearError(f"{app.id} has several commands (line {use.line})")
        if not isinstance(parent, ast.Call) or parent.func is not use.node or parent.args:
            shown = source_text(parent if isinstance(parent, ast.expr) else use.node)
            raise UnclearError(f"{shown} is more than a call of {app.id} (line {use.line})")
        check_keywords(parent, _OF_CALL)


def _parsed(definition: ast.FunctionDef, module: Scope, evaluate: Evaluate) -> Parsed:
    parameters = [*_parameters(definition, module, evaluate)]
    line = definition.lineno
    try:
        context = context_of([parameter.option for parameter in parameters], module, module.words)
    except click.ClickException as error:
        return Parsed({}, refused=error.format_message())
    if context is None:
        return Parsed({}, untold={name: value for one in parameters for name, value in _named(one, one.default)})
    values: dict[str, Argument] = {}
    for one in parameters:
        given = is_given(one.name, context)
        values |= _named(one, _made(one, context, line) if given else one.default)
    return Parsed(values)


def _named(parameter: TyperParameter, value: Argument) -> list[tuple[str, Argument]]:
    """Return what the parameter has, and its ``value`` if it is a member of an enumeration."""
    if not parameter.takes.members:
        return [(parameter.name, value)]
    reason = f"{parameter.name} is a member of an enumeration"
    itself = value if parameter.takes.is_text else Argument(Kind.UNKNOWN, line=value.line, reason=reason)
    of_none = value.kind is Kind.LITERAL and value.value is None
    return [(parameter.name, value)] if of_none else [(parameter.name, itself), (f"{parameter.name}.value", value)]


def _made(parameter: TyperParameter, context: click.Context, line: int) -> Argument:
    value: Any = context.params[parameter.name]
    parts = value if isinstance(value, tuple) else (value,)
    other = next((part.argument for part in parts if isinstance(part, Other)), None)
    return other if other is not None else told(parameter.name, context, line)


def _parameters(definition: ast.FunctionDef, module: Scope, evaluate: Evaluate) -> Iterator[TyperParameter]:
    signature = definition.args
    positional = [*signature.posonlyargs, *signature.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(signature.defaults))
    pairs = [*zip(positional, [*missing, *signature.defaults], strict=True)]
    for parameter, default in [*pairs, *zip(signature.kwonlyargs, signature.kw_defaults, strict=True)]:
        at = ScopedExpression(default or ast.Constant(...), module, definition.lineno)
        annotation = at.with_node(parameter.annotation) if parameter.annotation is not None else None
        if annotation is None or dotted_name(annotation) != _CONTEXT:
            reader = ParameterReader(parameter.arg, parameter.lineno, evaluate)
            yield reader.read(annotation, at if default is not None else None)
