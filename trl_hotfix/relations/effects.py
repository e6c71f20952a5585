"""What a trainer must not change: the objects that it was given, as texts before and after."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


class Given:
    """The arguments of a trainer, and what they were before it was made."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = dict(arguments)
        self._before = dict(self._texts())

    def changes(self) -> dict[str, tuple[str, str]]:
        """Return what has changed, before and after, by name."""
        now = dict(self._texts())
        return {name: (text, now.get(name, "nothing")) for name, text in self._before.items() if now.get(name) != text}

    def _texts(self) -> Iterator[tuple[str, str]]:
        for name, value in self._arguments.items():
            if name in ("args", "config"):
                yield from _named("argument", value.to_dict())
            elif name in ("processing_class", "tokenizer"):
                # A processor has one.
                words = getattr(value, "tokenizer", value)
                yield from _named("tokenizer", {each: getattr(words, each) for each in OF_TOKENIZER})
            elif name in ("model", "policy"):
                yield from _named("config", value.config.to_dict())
                yield from _named("generation config", _of(getattr(value, "generation_config", None)))
            elif name.endswith("_dataset"):
                yield from _rows(name.replace("_", " "), value)


OF_TOKENIZER = ("padding_side", "truncation_side", "pad_token", "eos_token", "bos_token", "chat_template")


def _named(kind: str, values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        yield f"{kind} {name}", repr(value)


def _rows(name: str, rows: Any) -> Iterator[tuple[str, str]]:
    sets = rows if isinstance(rows, dict) else {"": rows}
    for part, each in sets.items():
        yield f"{name} {part}".strip(), repr(list(each))


def _of(generation_config: Any) -> dict[str, Any]:
    """Return what a generation config has. transformers makes a list of the one end of sequence."""
    values = generation_config.to_dict() if generation_config is not None else {}
    return {name: value[0] if isinstance(value, list) and len(value) == 1 else value for name, value in values.items()}
