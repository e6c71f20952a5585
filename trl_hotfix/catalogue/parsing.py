"""From the text of a ``patches.yaml`` to patches: every mistake at once, each with its line."""

from __future__ import annotations

import contextlib
import typing
from collections.abc import Iterator, Mapping
from enum import Enum, EnumMeta
from typing import Any

import msgspec
from msgspec.structs import fields

from ..errors import CatalogueError, Mistake, suggestion
from ..model import Patch
from .checks import check
from .yaml_nodes import Node, compose, kind_of, line_finder


def parse(text: str, path: str, pack: str = "") -> tuple[Patch, ...]:
    """The patches that ``text`` declares. Raises ``CatalogueError`` with every mistake in it."""
    mistakes: list[Mistake] = []
    patches = list(_patches(text, mistakes, pack))
    if mistakes:
        # A text that ends too early is said to be wrong on the line after its last.
        last = len(text.splitlines()) or 1
        raise CatalogueError(path, [Mistake(min(each.line, last), each.message) for each in mistakes])
    return tuple(patches)


def _patches(text: str, mistakes: list[Mistake], pack: str) -> Iterator[Patch]:
    root = compose(text, mistakes)
    if root is None:
        return
    if not isinstance(root.value, list):
        mistakes.append(Mistake(root.line, f"expected a list of patches, found {kind_of(root.value)}"))
        return
    seen: dict[str, int] = {}
    for node in root.value:
        patch = _build(node, Patch, "patch", mistakes)
        line_of = line_finder(node)
        named = node.value.get("id") if isinstance(node.value, dict) else None
        if named is not None and isinstance(named.value, str):
            if named.value in seen:
                message = f"duplicate id {named.value!r}, first used on line {seen[named.value]}"
                mistakes.append(Mistake(named.line, message))
            seen.setdefault(named.value, named.line)
        if patch is not None:
            mistakes.extend(check(patch, line_of, pack))
            yield patch


def _build(node: Node, cls: Any, what: str, mistakes: list[Mistake]) -> Any:
    """An instance of the struct ``cls`` from ``node``, or None after saying all that is wrong with it."""
    if not isinstance(node.value, dict):
        mistakes.append(Mistake(node.line, f"expected {_a(what)} (a mapping), found {kind_of(node.value)}"))
        return None
    # msgspec stops at the first mistake and knows no lines: for an entry that has one, each value is looked at.
    with contextlib.suppress(msgspec.ValidationError):
        return msgspec.convert(node.plain(), cls)
    before = len(mistakes)
    known = {each.name: each for each in fields(cls)}
    for key in node.value:
        if key not in known:
            message = f"unknown key {key!r} in {_a(what)}{suggestion(key, known)}"
            mistakes.append(Mistake(node.key_lines[key], message))
    values = {}
    for name, each in known.items():
        if name in node.value:
            values[name] = _value(node.value[name], each.type, name, mistakes)
        elif each.required:
            mistakes.append(Mistake(node.line, f"the {what} lacks {name!r}"))
    return cls(**values) if len(mistakes) == before else None


def _value(node: Node, hint: Any, name: str, mistakes: list[Mistake]) -> Any:
    if _is_struct(hint):
        return _build(node, hint, name, mistakes)
    item = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None
    if _is_struct(item) and isinstance(node.value, list):
        return tuple(_build(each, item, name.removesuffix("s"), mistakes) for each in node.value)
    item = typing.get_args(hint)[1] if typing.get_origin(hint) is Mapping else None
    if _is_struct(item) and isinstance(node.value, dict):
        return {key: _build(each, item, name.removesuffix("s"), mistakes) for key, each in node.value.items()}
    try:
        return msgspec.convert(node.plain(), type=hint)
    except msgspec.ValidationError as error:
        remedy = ""
        if hint in (str, str | None):
            remedy = " (put a version or a range in quotes)"
        elif isinstance(hint, EnumMeta):
            choices: list[Enum] = list(hint.__members__.values())
            remedy = f" (one of {', '.join(str(choice.value) for choice in choices)})"
        mistakes.append(Mistake(node.line, f"{name}: {error}{remedy}"))
    return None


def _is_struct(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _a(what: str) -> str:
    return f"an {what}" if what[0] in "aeiou" else f"a {what}"
