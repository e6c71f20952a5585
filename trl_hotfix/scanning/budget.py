"""How much work one script may take. The text of a stranger can ask for more than there is time and memory for.

The scan counts its steps: each expression that it evaluates, each binding and each use of a name that it looks at. An
answer that takes too many of them is unknown, with the reason "too large". So a scan ends, and is never wrong for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from ..catalogue.conditions import Argument, Kind

STEPS_OF_SCRIPT = 150_000
STEPS_OF_QUESTION = 15_000
"""At most so many steps for a script, and for each argument of a trainer; scripts of TRL take 6,000."""

MOST_PARTS = 1_000
_LONGEST_TEXT = 10_000
_LARGEST_NUMBER = 1 << 256
"""At most so many parts has a value that is kept, and so large are its texts and whole numbers."""

REASON = "too large"

_Answer = TypeVar("_Answer")
_Other = TypeVar("_Other")
_Item = TypeVar("_Item")


class TooLargeError(Exception):
    """The steps are spent. ``Budget.ask`` catches it, and nothing else does."""


class Budget:
    """The steps of one script. ``spent`` never exceeds what the script may take."""

    def __init__(self, of_script: int = STEPS_OF_SCRIPT, of_question: int = STEPS_OF_QUESTION) -> None:
        self.spent = 0
        self._of_script, self._of_question = of_script, of_question
        self._limit = of_script

    def spend(self, steps: int = 1) -> None:
        """Count some steps. Raises ``TooLargeError`` if there are not so many left."""
        if self.spent + steps > self._limit:
            raise TooLargeError
        self.spent += steps

    def counted(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yield the items, and spend a step on each."""
        for item in items:
            self.spend()
            yield item

    def ask(self, question: Callable[[], _Answer], otherwise: _Other) -> _Answer | _Other:
        """Return the answer to a question, or ``otherwise`` if it takes too many steps."""
        self._limit = min(self.spent + self._of_question, self._of_script)
        try:
            return question()
        except (TooLargeError, RecursionError):
            return otherwise


def too_large(line: int | None) -> Argument:
    """Return the argument that is too large."""
    return Argument(Kind.UNKNOWN, line=line, reason=REASON)


def literal(value: Any, line: int | None) -> Argument:
    """Return the literal. A long text is some text, and other large values are unknown."""
    if isinstance(value, str) and len(value) > _LONGEST_TEXT:
        return Argument(Kind.OBJECT, line=line, made_by=("str",))
    return Argument(Kind.LITERAL, value, line) if is_small(value) else too_large(line)


def is_small(value: Any) -> bool:
    """Return whether a value can be compared and shown. One within another counts as often as it is there."""
    parts, looked_at = [value], 0
    while parts:
        part = parts.pop()
        looked_at += 1
        if looked_at > MOST_PARTS or not _is_small_part(part):
            return False
        if isinstance(part, dict):
            parts += [*part, *part.values()]
        elif isinstance(part, (list, tuple, set, frozenset)):
            parts += part
    return True


def _is_small_part(part: Any) -> bool:
    if isinstance(part, (str, bytes, list, tuple, dict, set, frozenset)):
        return len(part) <= (_LONGEST_TEXT if isinstance(part, (str, bytes)) else MOST_PARTS)
    return not isinstance(part, int) or abs(part) < _LARGEST_NUMBER
