"""A freeze file names exactly the patches of a run, such as ``trl_hotfix.json`` beside its checkpoints.

It is data: ids, revisions and options, which are looked up in the catalogue. No path, module or address in it is used.
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
"""The largest size of a freeze file in bytes. A record of a hundred patches takes a tenth of it."""


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
    """Return the freeze file at ``path``. Raises ``SettingError`` with every mistake, if the catalogue lacks a part.

    ``named`` are the packs that the user has named, with their releases. A pack that only the file names is a mistake.
    """
    try:
        frozen = msgspec.convert(json.loads(_content(path), object_pairs_hook=_without_duplicates), Frozen)
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        reason = plain(str(error)) or type(error).__name__
        raise SettingError(f"the freeze file {path!r} cannot be used: {reason}") from None
    named = named or {}
    required_packs = {pack_of(entry.id) for entry in frozen.patches} - {""} | frozen.packs.keys()
    mistakes = [
        f"it is of the pack {name!r}, which you have not named: packs=[...] or TRL_HOTFIX_PACKS"
        for name in sorted(required_packs - named.keys())
    ]
    for name in sorted(frozen.packs.keys() & named.keys()):
        in_file, installed = (release.partition("==")[0] for release in (frozen.packs[name], named[name]))
        if in_file != installed:
            mistakes.append(f"the pack {name!r} is of {in_file!r} there, of {installed!r} here")
    for entry in frozen.patches:
        patch = known.get(entry.id)
        if patch is None and pack_of(entry.id) not in {"", *named}:
            continue
        if patch is None:
            mistakes.append(f"unknown patch {entry.id!r}{suggestion(entry.id, known)}")
        else:
            mistakes += _differences(entry, patch)
    counts = Counter(entry.id for entry in frozen.patches)
    mistakes += [f"{patch_id!r} is there twice" for patch_id in sorted(counts) if counts[patch_id] > 1]
    if mistakes:
        lines = "".join(f"\n  {mistake}" for mistake in mistakes)
        raise SettingError(f"the freeze file {path!r} cannot be applied as it is:{lines}")
    return frozen


def _differences(entry: FrozenPatch, patch: Patch) -> list[str]:
    """Return what the file says of a patch and the catalogue does not have: its revision, or else its options."""
    if entry.revision != patch.revision:
        return [f"{entry.id} is revision {entry.revision} there, {patch.revision} in this trl_hotfix"]
    if entry.options.keys() != patch.options.keys():
        in_file, in_catalogue = (
            plain(", ".join(sorted(options))) or "none" for options in (entry.options, patch.options)
        )
        return [f"{entry.id} has the options {in_file} there, {in_catalogue} in this trl_hotfix"]
    return [
        f"{entry.id}.{name} is {choice!r}, expected {', '.join(patch.options[name].choices)}"
        for name, choice in entry.options.items()
        if choice not in patch.options[name].choices
    ]


def record(data: Any) -> dict[str, Any] | None:
    """Return ``data`` from a checkpoint or another rank with every field of a record, or None if it is not a record."""
    try:
        fields: dict[str, Any] = msgspec.to_builtins(msgspec.convert(data, Frozen))
    except msgspec.ValidationError:
        return None
    return fields


def _content(path: str) -> bytes:
    if not Path(path).is_file():
        # A pipe or a device may never end, and reading it would block the import of TRL.
        Path(path).stat()
        raise ValueError("it is no regular file")
    with Path(path).open("rb") as file:
        content = file.read(LARGEST + 1)
    if len(content) > LARGEST:
        raise ValueError(f"it has more than {LARGEST} bytes")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. A field that occurs twice is an error, since programs differ in which they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {duplicate!r} is there twice in one object")
    return fields
