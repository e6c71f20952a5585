"""A freeze file names exactly the patches of a run, such as ``trl_hotfix.json`` beside its checkpoints.

It is data: ids, revisions and options, which are looked up in the catalogue. No path, module or address in it is used.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import msgspec

from .. import regular_files
from ..catalogue.packs import pack_of
from ..errors import SettingError, listed, plain, quoted, reason, suggestion
from ..model import Patch
from .set_digest import digest_of

LARGEST = 1 << 18
"""The largest size of a freeze file in bytes. A record of 87 patches that all hit takes a quarter of it."""


SCHEMA = 2
"""The version of what a record holds. A file of `freeze` has no ``schema``, no words and no counts."""


EXPECTED = "the trl_hotfix.json of a run, or a file that `trl-hotfix freeze` has written"


WAY_ON = "write it again: `trl-hotfix freeze -o FILE`"
"""What helps against every mistake in a file."""


LONGEST_PATH = 1000
"""So much of a path is in a message: it has to be found."""


class FrozenSteps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In how many ``of`` the run's steps a patch was called and acted, and the spans of steps in which it was on."""

    of: int
    called: int
    acted: int
    on: list[list[int]]


class FrozenEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a repair changed in the first step of a run, or why nobody can say."""

    step: int
    loss: float | None = None
    loss_without: float | None = None
    gradient_norm: float | None = None
    gradient_norm_without: float | None = None
    cosine: float | None = None
    why: str | None = None


class FrozenPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A patch in a freeze file. In the record of a run it has a word and its counts, or the reason why it is apart."""

    id: str
    revision: int
    options: dict[str, str] = {}
    word: str | None = None
    called: int | None = None
    acted: int | None = None
    evaluation: dict[str, int] | None = None
    process: dict[str, int] | None = None
    steps: FrozenSteps | None = None
    all_ranks: dict[str, int] | None = None
    ranks: dict[str, list[int]] | None = None
    effect: FrozenEffect | None = None
    reason: str | None = None


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A freeze file. Only ``patches`` are applied."""

    patches: list[FrozenPatch]
    schema: int = SCHEMA
    unreached: list[FrozenPatch] = []
    reverted: list[FrozenPatch] = []
    observed: list[dict[str, Any]] = []
    hits: list[dict[str, Any]] = []
    problems: list[str] = []
    trl: str | None = None
    trl_hotfix: str | None = None
    digest: str | None = None
    packs: dict[str, str] = {}


def load(path: str, what: str = "freeze file") -> Frozen:
    """Return the freeze file or record at ``path``, whatever the catalogue has.

    Raises ``SettingError``, which calls the file ``what``.
    """
    shown = f"the {what} {quoted(path, LONGEST_PATH)} cannot be used"
    try:
        content = json.loads(_content(path), object_pairs_hook=_without_duplicates)
        _check_schema(content, shown)
        _check_entries(content, shown)
        return msgspec.convert(content, Frozen)
    except SettingError:
        raise
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise SettingError(f"{shown}: {reason(error)}; expected {EXPECTED}") from None


def read(path: str, known: Mapping[str, Patch], named: Mapping[str, str] | None = None) -> Frozen:
    """Return the freeze file at ``path``. Raises ``SettingError`` with every mistake, and with the way on.

    ``known`` are the patches by their names. ``named`` are the packs that the user has named, with their releases. A
    pack that only the file names is a mistake.
    """
    frozen, named = load(path), named or {}
    mistakes = _mistakes_of_packs(frozen, named)
    for number, entry in enumerate(frozen.patches, 1):
        patch = known.get(entry.id)
        if patch is None and pack_of(entry.id) in {"", *named}:
            mistakes.append(f"entry {number}: unknown patch {quoted(entry.id)}{suggestion(entry.id, known)}")
        elif patch is not None:
            mistakes += [f"entry {number}: {difference}" for difference in _differences(entry, patch)]
    counts = Counter(known[entry.id].id if entry.id in known else entry.id for entry in frozen.patches)
    mistakes += [f"{quoted(patch_id)} is there twice" for patch_id in sorted(counts) if counts[patch_id] > 1]
    mistakes += _mistakes_of_digest(frozen)
    if mistakes:
        shown = f"the freeze file {quoted(path, LONGEST_PATH)} cannot be applied as it is"
        raise SettingError(f"{shown}:{listed(mistakes)}\n  {WAY_ON}")
    return frozen


def _mistakes_of_packs(frozen: Frozen, named: Mapping[str, str]) -> list[str]:
    """Return the packs that the file needs and the user has not named, and those of another distribution."""
    required = {pack_of(entry.id) for entry in frozen.patches} - {""} | frozen.packs.keys()
    mistakes = [
        f"it is of the pack {quoted(name)}, which you have not named: packs=[...] or TRL_HOTFIX_PACKS"
        for name in sorted(required - named.keys())
    ]
    for name in sorted(frozen.packs.keys() & named.keys()):
        in_file, installed = (release.partition("==")[0] for release in (frozen.packs[name], named[name]))
        if in_file != installed:
            mistakes.append(f"the pack {quoted(name)} is of {quoted(in_file)} there, of {installed!r} here")
    return mistakes


def _mistakes_of_digest(frozen: Frozen) -> list[str]:
    """Return what to say if the digest of the file is not that of its entries. A file without a digest is fine."""
    found = digest_of(frozen.trl, map(msgspec.structs.asdict, frozen.patches))
    if frozen.digest is None or frozen.digest == found:
        return []
    of_what = f"its TRL and its {len(frozen.patches)} patches"
    return [f"its digest is {quoted(frozen.digest)}, and that of {of_what} is {found}: it was changed by hand"]


def _check_entries(content: Any, shown: str) -> None:
    """Raise ``SettingError`` with the first mistake of each entry whose fields are wrong. msgspec stops at one."""
    entries = content.get("patches") if isinstance(content, dict) else None
    mistakes = []
    for number, entry in enumerate(entries if isinstance(entries, list) else (), 1):
        try:
            msgspec.convert(entry, FrozenPatch)
        except msgspec.ValidationError as error:
            mistakes.append(f"entry {number}: {reason(error)}")
    if mistakes:
        raise SettingError(f"{shown}; expected {EXPECTED}:{listed(mistakes)}")


def _check_schema(content: Any, shown: str) -> None:
    """Raise ``SettingError`` for a file of a newer trl_hotfix, whose fields cannot be known here."""
    schema = content.get("schema", SCHEMA) if isinstance(content, dict) else SCHEMA
    if isinstance(schema, int) and schema > SCHEMA:
        raise SettingError(
            f"{shown}: its schema is {quoted(schema)}, and this trl_hotfix reads up to {SCHEMA}; install a newer one"
        )


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
        f"{entry.id}.{name} is {quoted(choice)}, expected {', '.join(patch.options[name].choices)}"
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
    """Return the bytes of a regular file. Anything else may never end, and would block the import of TRL."""
    content = regular_files.read(path, LARGEST)
    if not content:
        raise ValueError("it is empty")
    return content


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs as a dict. A field that occurs twice is an error, since programs differ in which they take."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        duplicate = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the field {quoted(duplicate)} is there twice in one object")
    return fields
