"""The bodies that TRL's releases have at each target: ``data/fingerprints.json``, and the same file of a pack."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TypedDict

from ..catalogue import packs
from ..catalogue.data_files import decoded, read_data

Body = TypedDict("Body", {"releases": list[str], "is": dict[str, str]})
"""The releases that have a body, and for each patch the verdict of its self-test on the body."""


@dataclass(frozen=True, slots=True)
class Bodies:
    """``fingerprints.json``: for every target, the bodies of the releases, and the self-test's verdict on each.

    A verdict is ``buggy`` (the self-test reproduced the bug on every release with this body), ``fixed`` or ``absent``.
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, Body]]

    def verdict(self, patch: str, target: str, body: str | None) -> str | None:
        """Return the verdict of ``patch`` on ``body`` at ``target`` (``module:attribute``), or None without one."""
        known = self.targets.get(target, {}).get(body or "")
        return known["is"].get(patch) if known is not None else None

    def at(self, target: str, release: str) -> str | None:
        """Return the body that ``release`` has at ``target``, or None if it has none."""
        for body, known in self.targets.get(target, {}).items():
            if release in known["releases"]:
                return body
        return None

    def releases_with(self, target: str, body: str | None) -> tuple[str, ...]:
        """Return the releases that have ``body`` at ``target``, oldest first."""
        known = self.targets.get(target, {}).get(body or "")
        return tuple(known["releases"]) if known is not None else ()


@functools.cache
def bodies() -> Bodies:
    """Return the bodies on record. Raises ``DamagedError``."""
    recorded: Bodies = read_data("fingerprints.json", Bodies)
    return recorded


def bodies_for(patch: str) -> Bodies:
    """Return the bodies on record for this patch: its pack's if it is of a pack. Raises ``DamagedError``."""
    pack = packs.pack_of(patch)
    return _of_pack(pack) if pack else bodies()


@functools.cache
def _of_pack(name: str) -> Bodies:
    """Return the bodies of a pack. Its file has the patches' ids without the name of the pack, which is added here."""
    pack = packs.find(name)
    path = pack.file("fingerprints.json")
    if path is None:
        return Bodies((), {})
    recorded: Bodies = decoded(path, Bodies, pack.release)
    for known in (body for by_digest in recorded.targets.values() for body in by_digest.values()):
        known["is"] = {f"{name}/{patch}": verdict for patch, verdict in known["is"].items()}
    return recorded
