"""What the parser of a script makes of its command line: the real ``argparse`` is given the options that the text has.

Only literals of the script reach it. A type, a default or a choice that the text does not tell leaves what depends on
it unknown.
"""

from __future__ import annotations

import argparse
import ast
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

from msgspec.structs import replace

from ..catalogue.conditions import Argument, Kind
from .budget import literal
from .option_texts import Opaque, OptionReader
from .origins import Evaluate, Origin
from .parser_texts import UnclearError, steps
from .scopes import ScopedExpression

PLACE = "the command line"
MOST_WORDS = 1_000
_BROKEN = (argparse.ArgumentError, AttributeError, IndexError, TypeError, ValueError)


class Parsed(NamedTuple):
    """The arguments by their names. ``refused``: why the script ends with an error. ``not_used``: words of no option.

    ``untold`` has the defaults of the arguments that a command line may set which nobody has told.
    """

    values: Mapping[str, Argument]
    not_used: Sequence[str] = ()
    refused: str = ""
    untold: Mapping[str, Argument] = {}


class _RefusedError(Exception):
    """The script ends here, with this message."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _RefusedError(message)

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _RefusedError("the script ends after its help or its version")

    def print_help(self, file: Any = None) -> None:
        """Say nothing."""


class ParserOfScript:
    """A parser that the text has. Raises ``UnclearError`` if the text does not tell its options."""

    def __init__(self, parser: Origin, evaluate: Evaluate) -> None:
        reader = OptionReader(evaluate)
        self._of_parser = reader.read_parser(parser.expression)
        self._added = [reader.read_step(step) for step in steps(parser)]
        self._lines: dict[str, int] = {}

    def is_complete_at(self, call: ScopedExpression) -> bool:
        """Return whether all options are added before a call."""
        added = [known.step.call for known in self._added]
        return all(one.scope is not call.scope or one.line < call.line for one in added)

    def untold(self) -> Parsed:
        """Return the arguments of a command line that nobody has told: those that no option sets are known."""
        parser = self._built()
        actions = [action for action in parser._actions if action.dest != "help"]
        defaults = {action.dest: parser.get_default(action.dest) for action in actions}
        fixed = {name: value for name, value in parser._defaults.items() if name not in defaults}
        return Parsed(self._arguments(fixed, set()), untold=self._arguments(defaults, set()))

    def parse(self, words: Sequence[str], *, others_allowed: bool) -> Parsed:
        """Parse some words as the script will."""
        if len(words) > MOST_WORDS:
            raise UnclearError(f"the command line has more than {MOST_WORDS} words")
        try:
            namespace, others = self._built().parse_known_args(list(words))
            given, _ = self._built(without_defaults=True).parse_known_args(list(words))
        except _RefusedError as error:
            return Parsed({}, refused=str(error))
        except _BROKEN as error:
            raise UnclearError(f"the parser raises {type(error).__name__}") from None
        if others and not others_allowed:
            return Parsed({}, others, refused=f"unrecognized arguments: {' '.join(others)}")
        return Parsed(self._arguments(vars(namespace), set(vars(given))), others)

    def _arguments(self, values: Mapping[str, Any], given: set[str]) -> dict[str, Argument]:
        found = {}
        for name, value in values.items():
            argument = _argument(value, self._lines.get(name))
            found[name] = (
                replace(argument, place=PLACE) if name in given and argument.kind is Kind.LITERAL else argument
            )
        return found

    def _built(self, *, without_defaults: bool = False) -> _Parser:
        """Build the parser. ``without_defaults``: it has values for those arguments only that the words have."""
        parser = _Parser(prog="script", usage="script", **self._of_parser)
        groups: dict[ast.AST | None, Any] = {None: parser}
        try:
            for step, flags, keywords in self._added:
                owner = groups.get(step.group, parser)
                if step.method == "set_defaults":
                    self._lines |= dict.fromkeys(keywords, step.call.line)
                    parser.set_defaults(**({} if without_defaults else keywords))
                elif step.method == "add_argument":
                    own = {**keywords, "default": argparse.SUPPRESS} if without_defaults else keywords
                    is_ending = keywords.get("action") in ("help", "version")
                    action = owner.add_argument(*flags, **(keywords if is_ending else own))
                    self._lines[action.dest] = step.call.line
                else:
                    groups[step.call.node] = getattr(owner, step.method)(**keywords)
        except _BROKEN as error:
            raise UnclearError(f"{step.method}() raises {type(error).__name__} (line {step.call.line})") from None
        return parser


def _argument(value: Any, line: int | None) -> Argument:
    if isinstance(value, Opaque):
        return value.argument
    parts: Iterable[Any] = value if isinstance(value, list) else ()
    opaque = next((part.argument for part in parts if isinstance(part, Opaque)), None)
    if opaque is not None:
        return Argument(Kind.UNKNOWN, line=opaque.line or line, reason=opaque.reason or "a part of it is no literal")
    return literal(value, line)
