"""Parts of an object that has the arguments of a command line: ``args.beta``, ``vars(args)["beta"]``."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .argparse_words import Parsed, ParserOfScript
from .argv import change_of_argv
from .indirect import asked_name
from .names import dotted_name
from .origins import Evaluate, Origin, origin
from .parser_texts import UnclearError, is_parser
from .scopes import ScopedExpression, called_name, source_text
from .uses import known_value

PARSING = frozenset(["parse_args", "parse_known_args"])


class Namespace(NamedTuple):
    """What ``parse_args()`` returns. ``unclear``: why the text does not tell it.

    ``reads_words``: of the command line, and not words of the script.
    """

    parsed: Parsed
    unclear: str = ""
    reads_words: bool = True


def told_part(expression: ScopedExpression, evaluate: Evaluate) -> Argument | None:
    """Return a part of such an object, or None if the expression is no part of one."""
    owner, name = _split(expression)
    if owner is None:
        return None
    made = origin(owner)
    namespace = namespace_of(made.expression, evaluate)
    if namespace is None:
        return None
    line = expression.node.lineno
    parsed, unclear, _ = namespace
    unclear = unclear or parsed.refused
    unknown = Argument(Kind.UNKNOWN, line=line, reason=f"{source_text(expression.node)} is of the command line")
    if unclear:
        return replace(unknown, reason=f"{unknown.reason}, and {unclear}")
    changed = _changed(made, name, expression, evaluate)
    if changed is not None:
        return changed
    if name in parsed.untold:
        default = parsed.untold[name]
        known = f", with the default {default.value!r}" if default.kind is Kind.LITERAL else ""
        return replace(unknown, reason=f"{unknown.reason}{known}")
    value = parsed.values.get(name, replace(unknown, reason=f"no option of the parser sets {name}"))
    within = next((change for changes in made.changes() if (change := changes.within(name))), None)
    if within is not None and isinstance(value.value, list):
        return Argument(Kind.UNKNOWN, line=within.line, reason=within.reason)
    return value


def told_names(expression: ScopedExpression, evaluate: Evaluate) -> Sequence[str] | Argument | None:
    """Return the names in ``vars(args)``, or the unknown argument. None if it is no such object."""
    owner = _of_vars(expression.node)
    made = origin(expression.with_node(owner)) if owner is not None else None
    namespace = namespace_of(made.expression, evaluate) if made is not None else None
    if made is None or namespace is None:
        return None
    change = next((change for changes in made.changes() if (change := changes.of_any())), None)
    if change is not None:
        return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
    reason = namespace.unclear or namespace.parsed.refused
    if reason:
        return Argument(Kind.UNKNOWN, line=expression.node.lineno, reason=reason)
    added = [name for changes in made.changes() for name in changes.by_part()]
    return [*dict.fromkeys([*namespace.parsed.values, *namespace.parsed.untold, *added])]


def _split(expression: ScopedExpression) -> tuple[ScopedExpression | None, str]:
    """Return ``args`` and ``beta`` of ``args.beta``, ``vars(args)["beta"]`` and ``getattr(args, "beta")``."""
    node = expression.node
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return expression.with_node(node.value), node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        owner = _of_vars(node.value)
        return (expression.with_node(owner) if owner is not None else None), str(node.slice.value)
    name = asked_name(node) if isinstance(node, ast.Call) else None
    if name is not None and isinstance(node, ast.Call):
        return expression.with_node(node.args[0]), name
    return None, ""


def _of_vars(node: ast.expr) -> ast.expr | None:
    if isinstance(node, ast.Call) and called_name(node.func) == "vars" and len(node.args) == 1:
        return node.args[0]
    return None


def _changed(made: Origin, name: str, expression: ScopedExpression, evaluate: Evaluate) -> Argument | None:
    """Return what the script sets a part to after the command line is read; None if it leaves it as it was."""
    for changes in made.changes():
        any_change = changes.of_any()
        set_by = changes.by_part().get(name, [])
        whole = [change for change in set_by if change.inner_part is None]
        value = known_value(whole, expression.scope, expression.line) if whole and any_change is None else None
        if value is not None:
            return evaluate(value)
        change = any_change or next(iter(set_by), None)
        if change is not None:
            return Argument(Kind.UNKNOWN, line=change.line, reason=change.reason)
    return None


def namespace_of(made: ScopedExpression, evaluate: Evaluate) -> Namespace | None:
    """Return what a call of ``parser.parse_args()`` returns; None for other parsers than those of ``argparse``."""
    known = made.scope.module.namespaces
    if made.node not in known:
        known[made.node] = _read(made, evaluate)
    found: Namespace | None = known[made.node]
    return found


def _read(made: ScopedExpression, evaluate: Evaluate) -> Namespace | None:
    call = made.node
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr not in PARSING:
        return None
    parser = origin(made.with_node(call.func.value))
    if not is_parser(parser.expression):
        return None
    try:
        return _parsed(made, call, parser, evaluate)
    except UnclearError as error:
        return Namespace(Parsed({}), str(error))


def _parsed(made: ScopedExpression, call: ast.Call, parser: Origin, evaluate: Evaluate) -> Namespace:
    reader = ParserOfScript(parser, evaluate)
    if not reader.is_complete_at(made):
        raise UnclearError("an option is added after the parser is used")
    others_allowed = isinstance(call.func, ast.Attribute) and call.func.attr == "parse_known_args"
    own = words_in_text(made, call, evaluate)
    if own is not None:
        parsed = reader.parse(own, others_allowed=others_allowed)
        if parsed.refused:
            raise UnclearError(f"the parser refuses the words of the script: {parsed.refused}")
        return Namespace(parsed, reads_words=False)
    line = change_of_argv(made.scope.module)
    if line is not None:
        raise UnclearError(f"sys.argv may be changed at line {line}")
    words = made.scope.module.words
    if words is None:
        return Namespace(reader.untold())
    return Namespace(reader.parse(words, others_allowed=others_allowed))


def words_in_text(made: ScopedExpression, call: ast.Call, evaluate: Evaluate) -> list[str] | None:
    """Return the words in ``parse_args(["--beta", "1"])``, or None if it reads the command line."""
    given = [*call.args, *(keyword.value for keyword in call.keywords)]
    if not given:
        return None
    keyword = call.keywords[0].arg if call.keywords else "args"
    words = made.with_node(given[0])
    if len(given) > 1 or keyword != "args" or isinstance(words.node, ast.Starred):
        raise UnclearError(f"{source_text(call)} has more than words")
    if _is_argv(words):
        return None
    value = evaluate(words)
    if value.kind is Kind.LITERAL and value.value is None:
        return None
    if value.kind is Kind.LITERAL and isinstance(value.value, list) and all(isinstance(x, str) for x in value.value):
        return list(value.value)
    raise UnclearError(f"{source_text(words.node)} has its words")


def _is_argv(words: ScopedExpression) -> bool:
    """Is it ``sys.argv[1:]``?"""
    node = words.node
    return (
        isinstance(node, ast.Subscript)
        and dotted_name(words.with_node(node.value)) == "sys.argv"
        and source_text(node.slice) == "1:"
    )
