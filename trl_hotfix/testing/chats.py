"""Messages for ``CharacterTokenizer``, and datasets of them that take no time to make."""

from __future__ import annotations

from typing import Any


def messages(*turns: str) -> list[dict[str, str]]:
    """Return a message of each text. Its first letter is the role's."""
    roles = {"s": "system", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn[1:]} for turn in turns]


def only_iterable(*rows: dict[str, Any]) -> Any:
    """Return a dataset that can be iterated and nothing else. A real one takes milliseconds to make."""
    from datasets import IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        def __init__(self) -> None: ...

        def __iter__(self) -> Any:
            return iter(rows)

    return Rows()
