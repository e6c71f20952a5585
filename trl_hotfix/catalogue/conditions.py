"""What a bug needs of the arguments of a trainer: the value language of ``hits`` in ``patches.yaml``.

``when: {packing: true, ref_model: unset}``. The value of an argument holds if it is

- a literal (``true``, ``4``, ``bfloat16``, ``null``): the argument is that, or a list with that in it;
- ``set``, ``unset``: the argument is given and not None; it is not given, or None. So a default is ``unset``;
- ``text``, ``object``: it is given as a string; as anything else that is no literal, such as a model;
- ``">1"``, ``"!=0"``: it is given and compares so. ``"!=@other"`` compares with another argument that is given;
- ``by *peft*``: it is an object, and a part of the name of what is called for it, as ``PeftModel`` in
  ``peft.PeftModel.from_pretrained(...)``, matches, without regard to capitals; if it is a list, one item's;
  ``not by *peft*``: it is an object, and none matches;
- a list: one of these holds.

``model.adapter_name`` is the argument ``adapter_name`` of the call that makes ``model``, or the key of a dict.
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
_COMPARED = re.compile(r"(!=|>=|<=|>|<)(.*)\Z", re.DOTALL)
_MADE = re.compile(r"(not )?by\b(.*)\Z", re.DOTALL)
_PATTERN = re.compile(r"[\w*?]+\Z")
_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "!=": operator.ne,
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}


class Kind(Enum):
    """What is known of an argument."""

    UNSET = "not given"
    LITERAL = "a literal"
    OBJECT = "an object"
    UNKNOWN = "unknown"


class Argument(Struct, frozen=True):
    """What a script says of one argument.

    ``by`` are the names of what makes an object; ``whole`` is False if there may be others. ``why`` is why it is
    unknown.
    """

    kind: Kind
    value: Any = None
    line: int | None = None
    by: tuple[str, ...] = ()
    whole: bool = True
    why: str = ""

    def said(self, name: str) -> str:
        """The argument in words, for a person."""
        at = f" (line {self.line})" if self.line is not None else ""
        if self.kind is Kind.UNSET:
            return f"{name} is not given"
        if self.kind is Kind.LITERAL:
            return f"{name}={_short(repr(self.value))}{at}"
        if self.kind is Kind.OBJECT:
            return f"{name}={_short(', '.join(self.by)) or '...'}{at}"
        return f"{name} is not a literal: {self.why}{at}"


Lookup = Callable[[str], Argument]


def validation_error(wanted: Any) -> str | None:
    """What is wrong with a value in ``when``; None: nothing."""
    if isinstance(wanted, list):
        if not wanted:
            return "an empty list of alternatives"
        nested = any(isinstance(each, list) for each in wanted)
        return "a list in a list" if nested else next(filter(None, map(validation_error, wanted)), None)
    if wanted is not None and not isinstance(wanted, (bool, int, float, str)):
        return f"expected a literal, a word, a comparison or a list of these, found a {type(wanted).__name__}"
    if not isinstance(wanted, str):
        return None
    compared = _COMPARED.match(wanted)
    if compared is not None:
        right = compared[2].strip()
        if right.startswith("@"):
            return None if NAME.match(right[1:]) else f"{wanted!r}: {right[1:]!r} is not the name of an argument"
        if not right or (compared[1] != "!=" and not isinstance(_number(right), float)):
            return (
                f"{wanted!r} compares with nothing; expected a number such as '>1', or an argument such as '!=@other'"
            )
    made = _MADE.match(wanted)
    if made is not None and not all(_PATTERN.match(each) for each in _patterns(made[2])):
        return f"{wanted!r}: expected names such as 'by BEMACallback' or 'not by *peft*'"
    return None


def evaluate(wanted: Any, argument: Argument, lookup: Lookup) -> bool | None:
    """Does ``argument`` meet what is wanted of it? None: the script does not say."""
    if isinstance(wanted, list):
        answers = [evaluate(each, argument, lookup) for each in wanted]
        return True if True in answers else None if None in answers else False
    if argument.kind is Kind.UNKNOWN:
        return None
    missing = argument.kind is Kind.UNSET or (argument.kind is Kind.LITERAL and argument.value is None)
    if wanted in ("set", "unset"):
        return missing if wanted == "unset" else not missing
    if wanted == "text":
        return argument.by == ("str",) or (argument.kind is Kind.LITERAL and isinstance(argument.value, str))
    if wanted == "object":
        return argument.kind is Kind.OBJECT and argument.by != ("str",)
    made = _MADE.match(wanted) if isinstance(wanted, str) else None
    if made is not None:
        if argument.kind is not Kind.OBJECT:
            return False
        found = _is_made_by(_patterns(made[2]), argument)
        return found if found is None or not made[1] else not found
    compared = _COMPARED.match(wanted) if isinstance(wanted, str) else None
    if compared is not None:
        return _compares(compared[1], compared[2].strip(), argument, lookup)
    if argument.kind is Kind.UNSET:
        return False
    if argument.kind is Kind.OBJECT:
        return False if wanted is None else None
    values = [argument.value, *(argument.value if isinstance(argument.value, (list, tuple)) else ())]
    return any(bool(each == wanted) for each in values)


def _is_made_by(patterns: list[str], argument: Argument) -> bool | None:
    parts = {part.lower() for name in argument.by for part in name.split(".")}
    if any(fnmatchcase(part, pattern.lower()) for part in parts for pattern in patterns):
        return True
    return False if argument.whole else None


def _compares(sign: str, right: str, argument: Argument, lookup: Lookup) -> bool | None:
    if argument.kind is Kind.OBJECT:
        return None
    value = argument.value
    if argument.kind is Kind.UNSET or value is None:
        return False
    if right.startswith("@"):
        other = lookup(right[1:])
        if other.kind is not Kind.LITERAL:
            return False if other.kind is Kind.UNSET else None
        return _is(sign, value, other.value)
    wanted = _number(right)
    return any(_is(sign, each, wanted) for each in (value if isinstance(value, (list, tuple)) else [value]))


def _is(sign: str, left: Any, right: Any) -> bool:
    try:
        # YAML reads 1e-5 as text.
        return _OPERATORS[sign](_number(left), _number(right))
    except TypeError:
        return False


def _number(value: Any) -> Any:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value


def _patterns(names: str) -> list[str]:
    return [each.strip() for each in names.split(",")]


def _short(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:57]}..."
