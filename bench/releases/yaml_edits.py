"""Edits of ``releases.yaml`` and ``patches.yaml`` for a new release, as text: comments and layout stay."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import msgspec
import yaml

from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Patch, Upstream

WIDTH = 120
"""The length of a line of ``releases.yaml``."""


class Change(NamedTuple):
    """A piece of a text, by its first index and the one behind its last, and what takes its place."""

    start: int
    end: int
    text: str


def changed(text: str, changes: Iterable[Change]) -> str:
    # From the last to the first, so that the indices of the others stay right.
    for change in sorted(changes, reverse=True):
        text = text[: change.start] + change.text + text[change.end :]
    return text


def with_release(text: str, before: str, release: str) -> str:
    """Return ``releases.yaml`` with ``release`` behind ``before`` in every list, and so on the same stacks.

    Raises ``ValueError`` if no list has ``before``.
    """
    places = [item for item in _items(yaml.compose(text)) if item.value == before]
    if not places:
        raise ValueError(f"releases.yaml: expected a list with {before!r}, found none; add {release!r} by hand")
    return changed(text, (_behind(text, item, f'"{release}"') for item in places))


def _items(node: yaml.Node | None) -> Iterator[yaml.ScalarNode]:
    """Give the scalar items of all lists in a document."""
    if isinstance(node, yaml.MappingNode):
        for _, value in node.value:
            yield from _items(value)
    elif isinstance(node, yaml.SequenceNode):
        yield from (item for item in node.value if isinstance(item, yaml.ScalarNode))
        for item in node.value:
            yield from _items(item)


def _behind(text: str, item: yaml.ScalarNode, addition: str) -> Change:
    """Return the change that adds an item to a list, on a new line where the present one would be too long."""
    end = item.end_mark.index
    line = text[text.rfind("\n", 0, end) + 1 :].partition("\n")[0]
    # Lines of a list begin below its first item.
    indent = len(line) - len(line.lstrip(" ["))
    separator = " " if len(line) + len(addition) + 2 <= WIDTH else "\n" + " " * indent
    return Change(end, end, f",{separator}{addition}")


def with_policy(text: str, before: Patch, after: Patch) -> str:
    """Return ``patches.yaml`` with the ranges, ``fixed_in`` and ``review_by`` of ``after`` in the entry of ``before``.

    Raises ``ValueError`` if the result is not ``after``.
    """
    entry = _entry(text, before.id)
    changes = []
    if after.trl != before.trl:
        changes.append(_set(entry, "trl", after.trl))
    if after.upstream.fixed_in not in (None, before.upstream.fixed_in):
        changes.append(_set(_value(entry, "upstream"), "fixed_in", str(after.upstream.fixed_in)))
    if after.review_by is None and before.review_by is not None:
        changes.append(_line_of(text, entry, "review_by"))
    targets = _value(entry, "targets").value
    for node, old, new in zip(targets, before.targets, after.targets, strict=True):
        if new.trl not in (None, old.trl):
            changes.append(_set(node, "trl", str(new.trl)))
    result = changed(text, changes)
    declared = next(value for value in yaml.safe_load(result) if value["id"] == after.id)
    if msgspec.convert(declared, Patch) != after:
        raise ValueError(f"patches.yaml: the entry of {after.id} cannot be edited by its layout; edit it by hand")
    return result


def ended(patch: Patch, release: str, fixed_modules: frozenset[str]) -> Patch:
    """Return ``patch`` as fixed in these modules from ``release`` on; the last module ends the range of the patch."""
    open_targets = [target for target in patch.targets if is_open(patch.range_of(target))]
    everywhere = all(target.module in fixed_modules for target in open_targets)
    targets = tuple(
        msgspec.structs.replace(target, trl=with_end(patch.range_of(target), release))
        # A target without a range of its own has that of the patch.
        if target in open_targets and target.module in fixed_modules and (target.trl is not None or not everywhere)
        else target
        for target in patch.targets
    )
    if not everywhere:
        return msgspec.structs.replace(patch, targets=targets)
    upstream: Upstream = msgspec.structs.replace(patch.upstream, fixed_in=release)
    trl = with_end(patch.trl, release)
    return msgspec.structs.replace(patch, targets=targets, trl=trl, upstream=upstream, review_by=None)


def is_open(specifiers: str) -> bool:
    """Return whether a range has no end."""
    return in_range("999999", specifiers)


def with_end(specifiers: str, release: str) -> str:
    """Return an open range that ends before ``release``: ``>=1.0,!=1.2`` becomes ``>=1.0,<1.3,!=1.2``."""
    first, *holes = specifiers.split(",")
    return ",".join([first, f"<{release}", *holes])


def _entry(text: str, patch_id: str) -> yaml.MappingNode:
    return next(entry for entry in yaml.compose(text).value if _value(entry, "id").value == patch_id)


def _value(mapping: yaml.MappingNode, name: str) -> yaml.Node:
    return next(value for key, value in mapping.value if key.value == name)


def _set(mapping: yaml.Node, name: str, value: str) -> Change:
    """Return the change that gives a key of a mapping a value, in quotes."""
    for key, node in mapping.value:
        if key.value == name:
            return Change(node.start_mark.index, node.end_mark.index, f'"{value}"')
    addition = f'{name}: "{value}"'
    if mapping.flow_style:
        end = mapping.end_mark.index - 1
        return Change(end, end, f", {addition}" if mapping.value else addition)
    (first, _), (_, last) = mapping.value[0], mapping.value[-1]
    end = last.end_mark.index
    return Change(end, end, f"\n{' ' * first.start_mark.column}{addition}")


def _line_of(text: str, mapping: yaml.MappingNode, name: str) -> Change:
    """Return the change that removes the line of a key."""
    key = next(key for key, _ in mapping.value if key.value == name)
    start = key.start_mark.index - key.start_mark.column
    return Change(start, text.index("\n", start) + 1, "")
