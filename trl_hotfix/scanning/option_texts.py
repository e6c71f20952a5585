"""The options of a parser as literals, with a stand-in for a type or a value that the text does not have."""

from __future__ import annotations

import argparse
import ast
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..catalogue.conditions import Argument, Kind
from ..errors import plain
from .names import dotted_name
from .origins import Evaluate
from .parser_texts import Step, UnclearError
from .scopes import ScopedExpression, source_text

_MOST_VALUES = 100
_MOST_OPEN_POSITIONALS = 2
"""At most so many positional arguments take any number of words: to match more of them takes exponential time."""

_TYPES = {"bool": bool, "float": float, "int": int, "str": str}
_NUMBERS_OF_VALUES = {
    "argparse.OPTIONAL": argparse.OPTIONAL,
    "argparse.REMAINDER": argparse.REMAINDER,
    "argparse.ZERO_OR_MORE": argparse.ZERO_OR_MORE,
    "argparse.ONE_OR_MORE": argparse.ONE_OR_MORE,
}
_STORING = frozenset(["store", "store_const", "store_false", "store_true"])
_ACTIONS = _STORING | {"append", "append_const", "count", "extend", "help", "version"}
_OF_HELP = frozenset(["deprecated", "help", "metavar", "version"])
_OF_PARSER = frozenset(
    ["color", "description", "epilog", "exit_on_error", "formatter_class", "prog", "suggest_on_error", "usage"]
)
_OF_WAY = {"add_help": bool, "allow_abbrev": bool, "conflict_handler": str}


class Opaque(NamedTuple):
    """A value that is no literal, in the place of one."""

    argument: Argument


class OpaqueType:
    """Stands for a type of the script."""

    def __init__(self, type_: ScopedExpression) -> None:
        self._text, self._line = source_text(type_.node), type_.node.lineno

    def __call__(self, word: str) -> Opaque:
        reason = f"what {self._text} makes of {plain(word)} is not in the text"
        return Opaque(Argument(Kind.UNKNOWN, line=self._line, reason=reason))


class Known(NamedTuple):
    """An option or defaults, with what they are added by."""

    step: Step
    flags: list[str]
    keywords: dict[str, Any]


class OptionReader:
    """Reads the calls that make a parser. Raises ``UnclearError`` for what no literal says."""

    def __init__(self, evaluate: Evaluate) -> None:
        self._evaluate = evaluate
        self._open: list[int] = []

    def read_parser(self, parser: ScopedExpression) -> dict[str, Any]:
        assert isinstance(parser.node, ast.Call)
        if parser.node.args[1:] or any(isinstance(given, ast.Starred) for given in parser.node.args):
            raise UnclearError(f"the parser has options by position (line {parser.node.lineno})")
        keywords: dict[str, Any] = {}
        for keyword in parser.node.keywords:
            if keyword.arg in _OF_WAY:
                value = self._literal(parser.with_node(keyword.value))
                if not isinstance(value, _OF_WAY[keyword.arg]):
                    raise UnclearError(f"{keyword.arg} of the parser is no literal")
                keywords[keyword.arg] = value
            elif keyword.arg not in _OF_PARSER:
                raise UnclearError(f"the parser has {keyword.arg or '**options'} (line {parser.node.lineno})")
        return keywords

    def read_step(self, step: Step) -> Known:
        call = step.call.node
        assert isinstance(call, ast.Call)
        if any(keyword.arg is None for keyword in call.keywords):
            raise UnclearError(f"{step.method}() has **options (line {call.lineno})")
        given = {str(keyword.arg): step.call.with_node(keyword.value) for keyword in call.keywords}
        if step.method == "set_defaults":
            return Known(step, [], {name: self._value(value) for name, value in given.items()})
        if step.method != "add_argument":
            required = "required" in given and self._literal(given["required"]) is True
            is_exclusive = step.method == "add_mutually_exclusive_group"
            return Known(step, [], {"required": required} if is_exclusive else {})
        flags = [self._literal(step.call.with_node(flag)) for flag in call.args]
        if not all(isinstance(flag, str) for flag in flags):
            raise UnclearError(f"the name of an option is no literal (line {call.lineno})")
        keywords = {name: self._option(name, value) for name, value in given.items() if name not in _OF_HELP}
        return Known(step, flags, self._checked(keywords, flags, call.lineno))

    def _checked(self, keywords: dict[str, Any], flags: Sequence[str], line: int) -> dict[str, Any]:
        if keywords.get("action") == "version":
            keywords["version"] = ""
        has_unknown_type = isinstance(keywords.get("type"), OpaqueType)
        default = keywords.get("default")
        if isinstance(default, Opaque) and keywords.get("type") is not None:
            # The type is applied to a default that is text.
            reason = default.argument.reason or "the type of the option may change its default"
            keywords["default"] = Opaque(Argument(Kind.UNKNOWN, line=line, reason=reason))
        if keywords.get("choices", ...) is None or (has_unknown_type and "choices" in keywords):
            # They are compared with what the type makes of a word.
            del keywords["choices"]
        is_positional = not any(flag.startswith("-") for flag in flags)
        if is_positional and keywords.get("nargs") in ("?", "*", "+", argparse.REMAINDER):
            self._open.append(line)
            if len(self._open) > _MOST_OPEN_POSITIONALS:
                raise UnclearError(f"more than {_MOST_OPEN_POSITIONALS} arguments take any number of words")
        return keywords

    def _option(self, name: str, value: ScopedExpression) -> Any:
        """Return one keyword of ``add_argument``."""
        if name in ("default", "const"):
            return self._value(value)
        if name == "type":
            return self._type(value)
        if name == "choices":
            choices = self._literal(value)
            return choices if isinstance(choices, list) else None
        if name == "required":
            return self._literal(value) is True
        known: Any = self._literal(value)
        dotted = dotted_name(value)
        if name == "action" and dotted == "argparse.BooleanOptionalAction":
            return argparse.BooleanOptionalAction
        if name == "nargs" and dotted in _NUMBERS_OF_VALUES:
            return _NUMBERS_OF_VALUES[dotted]
        is_number = name == "nargs" and type(known) is int and known <= _MOST_VALUES
        if (
            is_number
            or (name == "nargs" and known in ("?", "*", "+", None))
            or (name == "action" and known in _ACTIONS)
            or (name == "dest" and isinstance(known, str))
        ):
            return known
        raise UnclearError(f"{name}={source_text(value.node)} is not read (line {value.node.lineno})")

    def _type(self, type_: ScopedExpression) -> Callable[[str], Any] | None:
        node = type_.node
        if isinstance(node, ast.Constant) and node.value is None:
            return None
        if isinstance(node, ast.Name) and node.id in _TYPES and type_.find(node) is None:
            return _TYPES[node.id]
        return OpaqueType(type_)

    def _literal(self, expression: ScopedExpression) -> Any:
        """Return the value of a literal, or an ``Opaque``."""
        argument = self._evaluate(expression)
        return argument.value if argument.kind is Kind.LITERAL else Opaque(argument)

    def _value(self, expression: ScopedExpression) -> Any:
        return argparse.SUPPRESS if dotted_name(expression) == "argparse.SUPPRESS" else self._literal(expression)
