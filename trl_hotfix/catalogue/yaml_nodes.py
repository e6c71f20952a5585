"""Read YAML as nodes that know their lines, so that every mistake in a catalogue has its line."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import msgspec
import yaml

from ..errors import Mistake

DEPTH = 20


class Node(msgspec.Struct, frozen=True):
    """A YAML value with its line. A mapping's value is a dict of nodes, a sequence's a list of nodes."""

    value: Any
    line: int
    key_lines: Mapping[Hashable, int] = {}

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value


class _TooDeepError(Exception):
    pass


def compose(text: str, mistakes: list[Mistake]) -> Node | None:
    """Return the text as nodes, built while libyaml reads it. Its own composer overflows the stack on deep lists."""
    events = yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    unwanted: list[Mistake] = []
    wrong_values: list[Mistake] = []
    root = None
    try:
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent) and root is not None:
                mistakes.append(Mistake(_line(event), "not YAML: expected a single document, found another"))
                return None
            if isinstance(event, yaml.NodeEvent):
                root = _node(event, events, 0, unwanted, wrong_values)
    except _TooDeepError:
        pass
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        mistakes.append(Mistake(mark.line + 1 if mark else 1, f"not YAML: {error.problem or error.context}"))
        return None
    except yaml.YAMLError as error:
        mistakes.append(Mistake(1, f"not YAML: {error or type(error).__name__}"))
        return None
    mistakes.extend(unwanted or wrong_values)
    if root is None and not mistakes:
        mistakes.append(Mistake(1, "expected a list of entries, found nothing"))
    return None if unwanted else root


def _line(event: Any) -> int:
    return int(event.start_mark.line) + 1


def _node(event: Any, events: Iterator[Any], depth: int, unwanted: list[Mistake], mistakes: list[Mistake]) -> Node:
    """Return the value that begins with ``event``. Aliases and tags, which are not allowed, go to ``unwanted``."""
    line = _line(event)
    if isinstance(event, yaml.AliasEvent):
        unwanted.append(Mistake(line, f"an alias (*{event.anchor}); write the value out where it is used"))
        return Node(None, line)
    if event.tag not in (None, "!"):
        message = f"a tag ({event.tag}); a catalogue is plain text, numbers, lists and mappings"
        unwanted.append(Mistake(line, message))
    if isinstance(event, yaml.ScalarEvent):
        return Node(_scalar(event, mistakes), line)
    if depth == DEPTH:
        unwanted.append(Mistake(line, f"lists and mappings within one another, more than {DEPTH} deep"))
        raise _TooDeepError
    if isinstance(event, yaml.SequenceStartEvent):
        items = []
        while not isinstance(item := next(events), yaml.SequenceEndEvent):
            items.append(_node(item, events, depth + 1, unwanted, mistakes))
        return Node(items, line)
    values: dict[Hashable, Node] = {}
    lines: dict[Hashable, int] = {}
    while not isinstance(first := next(events), yaml.MappingEndEvent):
        key = _node(first, events, depth + 1, unwanted, mistakes)
        value = _node(next(events), events, depth + 1, unwanted, mistakes)
        if not isinstance(key.value, str):
            kind = f"{kind_of(key.value)} {key.plain()!r}"
            mistakes.append(Mistake(key.line, f"expected a name as the key, found {kind}"))
        elif key.value in values:
            mistakes.append(Mistake(key.line, f"duplicate key {key.value!r}, first used on line {lines[key.value]}"))
        else:
            values[key.value], lines[key.value] = value, key.line
    return Node(values, line, lines)


def _scalar(event: Any, mistakes: list[Mistake]) -> Any:
    tag = _RESOLVER.resolve(yaml.ScalarNode, event.value, event.implicit)
    if tag == "tag:yaml.org,2002:str":
        return event.value
    try:
        # The safe constructor refuses tags that name Python objects. A loader would scan an empty text for each value.
        node = yaml.ScalarNode(tag, event.value, event.start_mark, event.end_mark)
        return yaml.constructor.SafeConstructor().construct_object(node)
    except yaml.MarkedYAMLError as error:
        mistakes.append(Mistake(_line(event), f"not a plain value: {error.problem or error}"))
    except ValueError as error:  # An impossible date, such as 2026-02-31.
        mistakes.append(Mistake(_line(event), f"not a plain value: {error}"))
    return None


_RESOLVER: Any = yaml.resolver.Resolver()


def line_finder(node: Node) -> Callable[..., int]:
    """Return ``line_of``: ``line_of("targets", 0, "module")`` is the line of that value, or of its nearest parent."""

    def line_of(*steps: str | int) -> int:
        at = node
        for step in steps:
            inner = at.value[step] if not isinstance(at.value, dict) or step in at.value else None
            if inner is None:
                break
            at = inner
        return at.line

    return line_of


def kind_of(value: Any) -> str:
    if value is None:
        return "nothing"
    words: dict[type, str] = {dict: "a mapping", list: "a list", str: "text"}
    return words.get(type(value), f"a {type(value).__name__}")
