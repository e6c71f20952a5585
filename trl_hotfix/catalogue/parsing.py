"""Parse the text of a ``patches.yaml`` or a ``known.yaml``, or report every mistake in it with its line."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum, EnumMeta
from typing import Any

import msgspec
from msgspec.structs import fields

from ..errors import CatalogueError, Mistake, suggestion
from ..model import KnownBug, Patch
from .checks import check, check_known_bug
from .functions import check_functions
from .yaml_nodes import Node, compose, kind_of, line_finder

OF_A_REPAIR = tuple(field.name for field in fields(Patch) if field.name not in {own.name for own in fields(KnownBug)})
"""The keys that an entry of ``patches.yaml`` may have, and one of ``known.yaml`` may not."""


def parse(text: str, path: str, pack: str = "", *, modules: bool = True) -> tuple[Patch, ...]:
    """Return the patches that ``text`` declares. Raises ``CatalogueError`` with every mistake in it.

    With ``modules`` it imports the module of each patch and checks that it has the functions of the entry.
    """

    def build(node: Node, mistakes: list[Mistake]) -> Patch | None:
        if isinstance(node.value, dict) and "state" in node.value:
            message = "state: an entry here is a patch; a known bug without a repair is an entry of known.yaml"
            mistakes.append(Mistake(node.key_lines["state"], message))
            return None
        patch: Patch | None = _build(node, Patch, "patch", mistakes)
        if patch is not None:
            mistakes.extend(check(patch, line_finder(node)))
            if modules:
                mistakes.extend(check_functions(patch, line_finder(node), pack))
        return patch

    return _parse(text, path, build)


def parse_known(text: str, path: str, patch_ids: Collection[str]) -> tuple[KnownBug, ...]:
    """Return the known bugs without a repair that ``text`` declares. Raises ``CatalogueError`` with every mistake.

    No entry may have an id of ``patch_ids``, the ids of the patches.
    """

    def build(node: Node, mistakes: list[Mistake]) -> KnownBug | None:
        repair = [key for key in OF_A_REPAIR if isinstance(node.value, dict) and key in node.value]
        if repair:
            message = f"an entry here has no repair, and this one has {', '.join(repair)}: it belongs in patches.yaml"
            mistakes.append(Mistake(min(node.key_lines[key] for key in repair), message))
            return None
        bug: KnownBug | None = _build(node, KnownBug, "known bug", mistakes)
        if bug is not None:
            mistakes.extend(check_known_bug(bug, line_finder(node), patch_ids))
        return bug

    return _parse(text, path, build)


def parse_entries(
    text: str, path: str, cls: Any, noun: str, check: Callable[[Any, Callable[..., int]], Iterator[Mistake]]
) -> tuple[Any, ...]:
    """Return the entries of another file as structs ``cls``, whose name in messages is ``noun``.

    Raises ``CatalogueError`` with every mistake, those that ``check`` finds in an entry of the right types included.
    """

    def build(node: Node, mistakes: list[Mistake]) -> Any:
        entry = _build(node, cls, noun, mistakes)
        if entry is not None:
            mistakes.extend(check(entry, line_finder(node)))
        return entry

    return _parse(text, path, build)


def _parse(text: str, path: str, build: Callable[[Node, list[Mistake]], Any]) -> tuple[Any, ...]:
    mistakes: list[Mistake] = []
    entries = list(_entries(text, mistakes, build))
    if mistakes:
        # libyaml reports a text that ends too early on the line after the last one.
        last = len(text.splitlines()) or 1
        raise CatalogueError(path, [Mistake(min(mistake.line, last), mistake.message) for mistake in mistakes])
    return tuple(entries)


def _entries(text: str, mistakes: list[Mistake], build: Callable[[Node, list[Mistake]], Any]) -> Iterator[Any]:
    root = compose(text, mistakes)
    if root is None:
        return
    if not isinstance(root.value, list):
        mistakes.append(Mistake(root.line, f"expected a list of entries, found {kind_of(root.value)}"))
        return
    first_lines: dict[str, int] = {}
    for node in root.value:
        entry = build(node, mistakes)
        for id_node in _ids(node):
            if id_node.value in first_lines:
                message = f"duplicate id {id_node.value!r}, first used on line {first_lines[id_node.value]}"
                mistakes.append(Mistake(id_node.line, message))
            first_lines.setdefault(id_node.value, id_node.line)
        if entry is not None:
            yield entry


def _ids(node: Node) -> list[Node]:
    """Return the nodes of an entry's id, and of those that it had before: each is of one entry alone."""
    entry = node.value if isinstance(node.value, dict) else {}
    former = entry["formerly"].value if "formerly" in entry else []
    nodes = [*([entry["id"]] if "id" in entry else []), *(former if isinstance(former, list) else [])]
    return [each for each in nodes if isinstance(each.value, str)]


def _build(node: Node, cls: Any, noun: str, mistakes: list[Mistake]) -> Any:
    """Return an instance of the struct ``cls`` made from ``node``, or None after adding its mistakes to ``mistakes``.

    ``noun`` names the struct in messages.
    """
    if not isinstance(node.value, dict):
        mistakes.append(Mistake(node.line, f"expected {_a(noun)} (a mapping), found {kind_of(node.value)}"))
        return None
    # msgspec stops at the first mistake and knows no lines. An entry with a mistake is checked value by value.
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(node.plain(), cls)
    before = len(mistakes)
    known = {field.name: field for field in fields(cls)}
    for key in node.value:
        if key not in known:
            message = f"unknown key {key!r} in {_a(noun)}{suggestion(key, known)}"
            mistakes.append(Mistake(node.key_lines[key], message))
    values = {}
    for name, field in known.items():
        if name in node.value:
            values[name] = _value(node.value[name], field.type, name, mistakes)
        elif field.required:
            mistakes.append(Mistake(node.line, f"the {noun} lacks {name!r}"))
    return cls(**values) if len(mistakes) == before else None


def _value(node: Node, hint: Any, name: str, mistakes: list[Mistake]) -> Any:
    if _is_struct(hint):
        return _build(node, hint, name, mistakes)
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if _is_struct(item) and isinstance(node.value, list):
        return tuple(_build(child, item, name.removesuffix("s"), mistakes) for child in node.value)
    item = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
    if _is_struct(item) and isinstance(node.value, dict):
        return {key: _build(child, item, name.removesuffix("s"), mistakes) for key, child in node.value.items()}
    try:
        return msgspec.convert(node.plain(), type=hint)
    except msgspec.ValidationError as error:
        remedy = ""
        enumeration = next((part for part in (hint, *typing.get_args(hint)) if isinstance(part, EnumMeta)), None)
        if hint in (str, str | None):
            remedy = " (put a version or a range in quotes)"
        elif enumeration is not None:
            choices: list[Enum] = list(enumeration.__members__.values())
            remedy = f" (one of {', '.join(str(choice.value) for choice in choices)})"
        mistakes.append(Mistake(node.line, f"{name}: {error}{remedy}"))
    return None


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"
