"""A freeze file: exactly which patches a run had, as ``trl_hotfix.json`` beside its checkpoints says it.

It is data: ids, revisions and choices, which are looked up in the catalogue. No path, module or address in it is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from ..catalogue.packs import pack_of
from ..errors import SettingError, plain, suggestion
from ..model import Patch

LARGEST = 1 << 16
"""Bytes. A record of a hundred patches is a tenth of it."""


class FrozenPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    revision: int
    options: dict[str, str] = {}


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patches: list[FrozenPatch]
    trl: str | None = None
    trl_hotfix: str | None = None
    digest: str | None = None
    packs: dict[str, str] = {}


def read(path: str, known: Mapping[str, Patch], named: Mapping[str, str] | None = None) -> Frozen:
    """The freeze file at ``path``, if this catalogue has all of it. Raises ``SettingError`` with every mistake.

    ``named`` are the packs that the user has named, with their releases. That the file names one is not enough.
    """
    try:
        frozen = msgspec.convert(json.loads(_content(path), object_pairs_hook=_each_once), Frozen)
    # Up to 0.20, what msgspec raises is no ValueError.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        why = plain(str(error)) or type(error).__name__
        raise SettingError(f"the freeze file {path!r} cannot be used: {why}") from None
    named = named or {}
    wanted = {pack_of(each.id) for each in frozen.patches} - {""} | frozen.packs.keys()
    mistakes = [
        f"it is of the pack {name!r}, which you have not named: packs=[...] or TRL_HOTFIX_PACKS"
        for name in sorted(wanted - named.keys())
    ]
    for name in sorted(frozen.packs.keys() & named.keys()):
        there, here = (release.partition("==")[0] for release in (frozen.packs[name], named[name]))
        if there != here:
            mistakes.append(f"the pack {name!r} is of {there!r} there, of {here!r} here")
    for each in frozen.patches:
        patch = known.get(each.id)
        if patch is None and pack_of(each.id) not in {"", *named}:
            continue
        if patch is None:
            mistakes.append(f"unknown patch {each.id!r}{suggestion(each.id, known)}")
        elif each.revision != patch.revision:
            mistakes.append(f"{each.id} is revision {each.revision} there, {patch.revision} in this trl_hotfix")
        elif each.options.keys() != patch.options.keys():
            there, here = (plain(", ".join(sorted(its))) or "none" for its in (each.options, patch.options))
            mistakes.append(f"{each.id} has the options {there} there, {here} in this trl_hotfix")
        else:
            for name, choice in each.options.items():
                if choice not in patch.options[name].choices:
                    mistakes.append(
                        f"{each.id}.{name} is {choice!r}, expected {', '.join(patch.options[name].choices)}"
                    )
    times = Counter(each.id for each in frozen.patches)
    mistakes += [f"{each!r} is there twice" for each in sorted(times) if times[each] > 1]
    if mistakes:
        raise SettingError(
            f"the freeze file {path!r} cannot be applied as it is:" + "".join(f"\n  {x}" for x in mistakes)
        )
    return frozen


def record(data: Any) -> dict[str, Any] | None:
    """``data`` from a checkpoint or another rank, with every field that a record has; None if it is no record."""
    try:
        found: dict[str, Any] = msgspec.to_builtins(msgspec.convert(data, Frozen))
    except msgspec.ValidationError:
        return None
    return found


def _content(path: str) -> bytes:
    if not Path(path).is_file():
        # A pipe or a device may never end, and who waits for it holds up the import of TRL.
        Path(path).stat()
        raise ValueError("it is no regular file")
    with Path(path).open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return content


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Of two fields of one name, other programs take the other one."""
    once = dict(pairs)
    if len(once) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"the field {twice!r} is there twice in one object")
    return once
