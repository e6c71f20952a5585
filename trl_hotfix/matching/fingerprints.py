"""The bodies that TRL's releases have at each target: ``data/fingerprints.json``, and the same file of a pack."""

from __future__ import annotations

import functools
from typing import TypedDict

from msgspec import Struct
from packaging.version import Version

from ..catalogue import packs
from ..catalogue.data_files import decoded, read_data
from . import inherited
from .versions import is_unreleased

Body = TypedDict("Body", {"releases": list[str], "is": dict[str, str]})
"""The releases that have a body, and for each patch the verdict of its self-test on the body."""


Inherited = TypedDict("Inherited", {"of": str, "by": list[str], "is": dict[str, dict[str, str]]})
"""What a target is in transformers, the releases in range that inherit it, and by body the verdict for each patch.

``inherited`` has the bodies that it has in the releases of transformers.
"""


class Bodies(Struct, frozen=True):
    """``fingerprints.json``: for every target, the bodies of the releases, and the self-test's verdict on each.

    A target may have bodies of TRL in some releases, and be inherited from transformers in others.

    A verdict is ``buggy`` (the self-test reproduced the bug on every release with this body), ``fixed`` or ``absent``.
    """

    releases: tuple[str, ...]
    targets: dict[str, dict[str, Body]]
    inherited: dict[str, Inherited] = {}

    def verdict(self, patch: str, target: str, body: str | None) -> str | None:
        """Return the verdict of ``patch`` on ``body`` at ``target`` (``module:attribute``), or None without one."""
        known = self.targets.get(target, {}).get(body or "")
        verdict = known["is"].get(patch) if known is not None else None
        if verdict is None and target in self.inherited:
            verdict = self.inherited[target]["is"].get(body or "", {}).get(patch)
        return verdict

    def has_buggy(self, patch: str, target: str) -> bool:
        """Return whether there is a body at ``target`` with which ``patch`` goes on."""
        inherited = self.inherited[target]["is"] if target in self.inherited else {}
        return any(self.verdict(patch, target, body) == "buggy" for body in [*self.targets.get(target, ()), *inherited])

    def at(self, target: str, release: str, transformers: str | None = None) -> str | None:
        """Return the body that ``release`` has at ``target``, or None if it has no body, or inherits it.

        With a version of transformers, it is the body that is inherited from there.
        """
        for body, known in self.targets.get(target, {}).items():
            if release in known["releases"]:
                return body
        return inherited.body_of(self.inherits(target, release), transformers)

    def inherits(self, target: str, release: str) -> str | None:
        """Return what ``release`` inherits at ``target``, such as ``transformers:Trainer.training_step``, or None."""
        known = self.inherited.get(target)
        return known["of"] if known is not None and release in known["by"] else None

    def releases_with(self, target: str, body: str | None) -> tuple[str, ...]:
        """Return the releases that have ``body`` at ``target``, oldest first, or inherit it from some transformers."""
        known = self.targets.get(target, {}).get(body or "")
        if known is None and target in self.inherited and body in self.inherited[target]["is"]:
            return tuple(self.inherited[target]["by"])
        return tuple(known["releases"]) if known is not None else ()


@functools.cache
def bodies() -> Bodies:
    """Return the bodies on record. Raises ``DamagedError``."""
    recorded: Bodies = read_data("fingerprints.json", Bodies)
    return recorded


@functools.cache
def unproven(trl: str) -> str | None:
    """Return a clause on a TRL that nobody has proved the patches on, or None.

    A fork, and a development version between releases, is close to a release that was.
    """
    version, known = Version(trl), [Version(release) for release in bodies().releases]
    # A checkout that has yet no evidence proves nothing of any release.
    if not known:
        return None
    is_close = is_unreleased(trl) and Version(version.base_version) <= known[-1]
    if is_close or Version(version.public) in known:
        return None
    return f"TRL {trl} is not among the releases that were proved (newest {bodies().releases[-1]})"


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
    for verdicts in (verdicts for known in recorded.inherited.values() for verdicts in known["is"].values()):
        of_pack = {f"{name}/{patch}": verdict for patch, verdict in verdicts.items()}
        verdicts.clear()
        verdicts.update(of_pack)
    return recorded
