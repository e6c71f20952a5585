"""The bodies that TRL's releases have at each target: ``data/fingerprints.json``, and that of a pack."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

from ..catalogue import packs
from ..catalogue.data_files import data_file, decoded

Body = TypedDict("Body", {"releases": list[str], "is": dict[str, str]})
"""The releases that have a body, and for each patch what its self-test said of it."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """``fingerprints.json``: for every target, the bodies that releases have, and what the self-test said of each.

    ``what`` is ``buggy`` (the self-test reproduced the bug on every release with this body), ``fixed`` or ``absent``.
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, Body]]

    def what(self, patch: str, target: str, body: str | None) -> str | None:
        """What is known of ``body`` at ``target`` (``module:attribute``) for ``patch``; None: nothing."""
        known = self.targets.get(target, {}).get(body or "")
        return known["is"].get(patch) if known is not None else None

    def at(self, target: str, release: str) -> str | None:
        """The body that ``release`` has at ``target``; None if it has none."""
        for body, known in self.targets.get(target, {}).items():
            if release in known["releases"]:
                return body
        return None

    def releases_with(self, target: str, body: str | None) -> tuple[str, ...]:
        """The releases that have ``body`` at ``target``, oldest first."""
        known = self.targets.get(target, {}).get(body or "")
        return tuple(known["releases"]) if known is not None else ()


@functools.cache
def bodies() -> Bodies:
    """The bodies on record. Raises ``DamagedError``."""
    found: Bodies = decoded(data_file("fingerprints.json"), Bodies)
    return found


def bodies_for(patch: str) -> Bodies:
    """The bodies on record for this patch: ours, or those of the pack that it is of. Raises ``DamagedError``."""
    pack = packs.pack_of(patch)
    return _of_pack(pack) if pack else bodies()


@functools.cache
def _of_pack(name: str) -> Bodies:
    """What a pack says, of its own patches: its file has their ids as its ``patches.yaml`` has them."""
    pack = packs.find(name)
    path = pack.file("fingerprints.json")
    if path is None:
        return Bodies((), {})
    found: Bodies = decoded(path, Bodies, pack.release)
    for known in (each for its in found.targets.values() for each in its.values()):
        known["is"] = {f"{name}/{patch}": what for patch, what in known["is"].items()}
    return found
