"""The conditions under which a bug is hit: ``when`` of ``hits`` in ``patches.yaml``, a condition for each argument.

In ``when: {packing: true, ref_model: unset}`` both conditions must hold. A condition is one of these:

- a literal (``true``, ``4``, ``bfloat16``, ``null``): the argument equals it, or is a list that contains it;
- ``set``: the argument is given and not None; ``unset``: it is not given, or None. So a default is ``unset``;
- ``text``: it is given as a string; ``object``: it is given as anything else that is no literal, such as a model;
- ``">1"``, ``"!=0"``: it is given and the comparison is true. ``"!=@other"`` compares with another given argument;
- ``by *peft*``: it is an object, and the pattern matches a part of the name of what was called to make it, such as
  ``PeftModel`` in ``peft.PeftModel.from_pretrained(...)``. Upper and lower case are the same. For a list, one element
  must match. ``not by *peft*``: it is an object, and no part matches;
- a list: one of its conditions holds.

``model.adapter_name`` is the argument ``adapter_name`` of the call that makes ``model``, or that key of a dict.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from msgspec import Struct

NAME = re.compile(r"[a-z_]\w*(\.[a-z_]\w*)?\Z")
_COMPARISON = re.compile(r"(!=|>=|<=|>|<)(.*)\Z", re.DOTALL)
_MADE_BY = re.compile(r"(not )?by\b(.*)\Z", re.DOTALL)
_PATTERN = re.compile(r"[\w*?]+\Z")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class Kind(Enum):
    """The kinds of what a script tells about an argument."""

    UNSET = "not given"
    LITERAL = "a literal"
    OBJECT = "an object"
    UNKNOWN = "unknown"


Position = Callable[[int], str]


def line_in_words(line: int) -> str:
    return f"line {line}"


class Argument(Struct, frozen=True):
    """One argument of a trainer, as far as a script, or the trainer itself, tells it.

    ``made_by`` has the dotted names of the classes or functions that make an object; ``complete`` is False if there may
    be more. ``reason`` says why the argument is unknown. ``is_default``: a real trainer has the default, given or not.
    ``may_be_default``: an old run has the default, and we do not know whether it was given.
    ``alternatives``: the argument is unknown, and it is one of these. ``place`` names where the value stands if that is
    not in the script, such as "c.yaml, line 3"; ``line`` is then where the script uses it.
    """

    kind: Kind
    value: Any = None
    line: int | None = None
    made_by: tuple[str, ...] = ()
    complete: bool = True
    reason: str = ""
    is_default: bool = False
    may_be_default: bool = False
    alternatives: tuple[Argument, ...] = ()
    place: str = ""

    def where(self, position: Position) -> str:
        """Return the place of the value in words, such as " (line 3)". It is empty for a value without one."""
        place = self.place or (position(self.line) if self.line is not None else "")
        return f" ({place})" if place else ""

    def describe(self, name: str, position: Position = line_in_words) -> str:
        """Describe the argument in words. ``position`` names a line, as with its cell in a notebook."""
        location = self.where(position)
        if self.kind is Kind.UNSET:
            return f"{name} is not given"
        if self.kind is Kind.LITERAL:
            return f"{name}={_short(repr(self.value))}{location}"
        if self.kind is Kind.OBJECT:
            return f"{name}={_short(', '.join(self.made_by)) or '...'}{location}"
        return f"{name} is unknown: {self.reason}{location}"


UNSET = Argument(Kind.UNSET)
"""An argument that is not given."""

Lookup = Callable[[str], Argument]


def validation_error(condition: Any) -> str | None:
    """Return what is wrong with a condition in ``when``, or None if it is valid."""
    if isinstance(condition, list):
        if not condition:
            return "an empty list of alternatives"
        nested = any(isinstance(alternative, list) for alternative in condition)
        return "a list in a list" if nested else next(filter(None, map(validation_error, condition)), None)
    if condition is not None and not isinstance(condition, (bool, int, float, str)):
        return f"expected a literal, a word, a comparison or a list of these, found a {type(condition).__name__}"
    if not isinstance(condition, str):
        return None
    comparison = _COMPARISON.match(condition)
    if comparison is not None:
        right = comparison[2].strip()
        if right.startswith("@"):
            return None if NAME.match(right[1:]) else f"{condition!r}: {right[1:]!r} is not the name of an argument"
        if not right or (comparison[1] != "!=" and not isinstance(_number(right), float)):
            expected = "expected a number such as '>1', or an argument such as '!=@other'"
            return f"{condition!r} compares with nothing; {expected}"
    made_by = _MADE_BY.match(condition)
    if made_by is not None and not all(_PATTERN.match(pattern) for pattern in _patterns(made_by[2])):
        return f"{condition!r}: expected names such as 'by BEMACallback' or 'not by *peft*'"
    return None


def evaluate(condition: Any, argument: Argument, lookup: Lookup) -> bool | None:
    """Return whether the condition holds for ``argument``, or None if the script does not tell.

    ``lookup`` returns another argument of the same trainer.
    """
    if argument.kind is Kind.UNKNOWN and argument.alternatives:
        possible = {evaluate(condition, alternative, lookup) for alternative in argument.alternatives}
        return possible.pop() if len(possible) == 1 else None
    if isinstance(condition, list):
        answers = [evaluate(alternative, argument, lookup) for alternative in condition]
        return True if True in answers else None if None in answers else False
    if argument.kind is Kind.UNKNOWN:
        return None
    missing = (
        argument.kind is Kind.UNSET or argument.is_default or (argument.kind is Kind.LITERAL and argument.value is None)
    )
    if condition in ("set", "unset"):
        if argument.may_be_default and not missing:
            return None
        return missing if condition == "unset" else not missing
    if condition == "text":
        return argument.made_by == ("str",) or (argument.kind is Kind.LITERAL and isinstance(argument.value, str))
    if condition == "object":
        return argument.kind is Kind.OBJECT and argument.made_by != ("str",)
    made_by = _MADE_BY.match(condition) if isinstance(condition, str) else None
    if made_by is not None:
        if argument.kind is not Kind.OBJECT:
            return False
        matches = _is_made_by(_patterns(made_by[2]), argument)
        negated = bool(made_by[1])
        return not matches if negated and matches is not None else matches
    comparison = _COMPARISON.match(condition) if isinstance(condition, str) else None
    if comparison is not None:
        return _compares_with(comparison[1], comparison[2].strip(), argument, lookup)
    if argument.kind is Kind.UNSET:
        return False
    if argument.kind is Kind.OBJECT:
        return False if condition is None else None
    values = [argument.value, *(argument.value if isinstance(argument.value, (list, tuple)) else ())]
    return any(bool(value == condition) for value in values)


def _is_made_by(patterns: list[str], argument: Argument) -> bool | None:
    parts = {part.lower() for name in argument.made_by for part in name.split(".")}
    if any(fnmatchcase(part, pattern.lower()) for part in parts for pattern in patterns):
        return True
    return False if argument.complete else None


def _compares_with(sign: str, right: str, argument: Argument, lookup: Lookup) -> bool | None:
    if argument.kind is Kind.OBJECT:
        return None
    value = argument.value
    if argument.kind is Kind.UNSET or value is None:
        return False
    if right.startswith("@"):
        second = lookup(right[1:])
        if second.kind is not Kind.LITERAL:
            return False if second.kind is Kind.UNSET else None
        return _compare(sign, value, second.value)
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(_compare(sign, element, right) for element in values)


def _compare(sign: str, value: Any, bound: Any) -> bool:
    try:
        # YAML reads 1e-5 as text.
        return _OPERATORS[sign](_number(value), _number(bound))
    except TypeError:
        return False


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _patterns(names: str) -> list[str]:
    return [name.strip() for name in names.split(",")]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
