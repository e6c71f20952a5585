"""Groups of ``click``: which words of the command line a command gets, and who calls it."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from .names import dotted_name
from .origins import Evaluate
from .parser_texts import UnclearError
from .scopes import Scope, ScopedExpression

_CUT = ("_cmd", "_command", "_group", "_grp")
"""Endings of functions that newer releases of click leave out of the names of commands."""


def group_of(decorator: ScopedExpression) -> ast.FunctionDef | None:
    """Return the function ``cli`` of ``@cli.command()``, if that is a group of click."""
    call = decorator.node
    function = call.func if isinstance(call, ast.Call) else None
    if not isinstance(function, ast.Attribute) or function.attr != "command":
        return None
    bound = decorator.find(function.value) if isinstance(function.value, ast.Name) else None
    definition = bound.binding.definition if bound is not None else None
    if not isinstance(definition, ast.FunctionDef):
        return None
    made = [getattr(node, "func", node) for node in definition.decorator_list]
    return definition if "click.group" in [dotted_name(decorator.with_node(node)) for node in made] else None


def words_of_group(
    definition: ast.FunctionDef | ast.AsyncFunctionDef, decorator: ScopedExpression, module: Scope, evaluate: Evaluate
) -> Sequence[str] | None:
    """Return the words behind the name of a command, where its group has no options. Raises ``UnclearError``."""
    group, call = group_of(decorator), decorator.node
    assert isinstance(call, ast.Call)
    if group is None or not _is_plain(group):
        raise UnclearError("its group has options of its own")
    check_calls(group, module, methods=("command",))
    name = _name_of(definition, decorator, call, evaluate)
    words = module.words
    if words is not None and (not words or words[0] != name):
        raise UnclearError(f"the command line does not start {name}")
    return words[1:] if words is not None else None


def _is_plain(group: ast.FunctionDef) -> bool:
    """Is it ``@click.group()`` alone, on a function without parameters?"""
    (made, *others) = group.decorator_list
    has_options = isinstance(made, ast.Call) and bool(made.args or made.keywords)
    return not others and not has_options and not ast.unparse(group.args)


def _name_of(
    definition: ast.FunctionDef | ast.AsyncFunctionDef,
    decorator: ScopedExpression,
    call: ast.Call,
    evaluate: Evaluate,
) -> str:
    given = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "name")]
    if not given and not call.keywords and not definition.name.endswith(_CUT):
        return definition.name.lower().replace("_", "-")
    value = evaluate(decorator.with_node(given[0])).value if len(given) == 1 else None
    if not isinstance(value, str) or len(call.keywords) + len(call.args) > 1:
        raise UnclearError(f"the text does not tell the name of the command (line {call.lineno})")
    return value


def check_calls(definition: ast.FunctionDef | ast.AsyncFunctionDef, module: Scope, methods: Sequence[str] = ()) -> None:
    """Raise ``UnclearError`` if the command may be called with other words than those of the command line.

    ``methods`` of it change no words.
    """
    name = definition.name
    if [binding.definition for binding in module.bindings.get(name, ())] != [definition]:
        raise UnclearError(f"{name} is no function of the module, or assigned again")
    for use in module.budget.counted(module.uses.get(name, ())):
        call = use.parent.node if use.parent is not None else None
        if isinstance(call, ast.Attribute) and call.attr in methods:
            continue
        is_plain = isinstance(call, ast.Call) and call.func is use.node and not call.args
        if not (is_plain and isinstance(call, ast.Call) and {key.arg for key in call.keywords} <= {"standalone_mode"}):
            raise UnclearError(f"{name} may be called with other words (line {use.line})")
