"""A freeze file: exactly which patches a run had, as ``trl_hotfix.json`` beside its checkpoints says it.

It is data: ids, revisions and choices, which are looked up in the catalogue. No path, module or address in it is used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from .errors import SettingError, suggestion
from .model import Patch


class FrozenPatch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    revision: int
    options: dict[str, str] = {}


class Frozen(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    patches: list[FrozenPatch]
    trl: str | None = None
    trl_hotfix: str | None = None
    digest: str | None = None


def read(path: str, known: Mapping[str, Patch]) -> Frozen:
    """The freeze file at ``path``, if this catalogue has all of it. Raises ``SettingError`` with every mistake."""
    try:
        frozen = msgspec.json.decode(Path(path).read_bytes(), type=Frozen)
    except (OSError, ValueError, RecursionError) as error:
        raise SettingError(f"the freeze file {path!r} cannot be used: {error or type(error).__name__}") from None
    mistakes = []
    for each in frozen.patches:
        patch = known.get(each.id)
        if patch is None:
            mistakes.append(f"unknown patch {each.id!r}{suggestion(each.id, known)}")
        elif each.revision != patch.revision:
            mistakes.append(f"{each.id} is revision {each.revision} there, {patch.revision} in this trl_hotfix")
        elif each.options.keys() != patch.options.keys():
            there, here = (", ".join(sorted(options)) or "none" for options in (each.options, patch.options))
            mistakes.append(f"{each.id} has the options {there} there, {here} in this trl_hotfix")
        else:
            for name, choice in each.options.items():
                if choice not in patch.options[name].choices:
                    mistakes.append(
                        f"{each.id}.{name} is {choice!r}, expected {', '.join(patch.options[name].choices)}"
                    )
    ids = [each.id for each in frozen.patches]
    mistakes += [f"{each!r} is there twice" for each in sorted({each for each in ids if ids.count(each) > 1})]
    if mistakes:
        raise SettingError(
            f"the freeze file {path!r} cannot be applied as it is:" + "".join(f"\n  {x}" for x in mistakes)
        )
    return frozen
