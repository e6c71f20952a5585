"""The data files of this package: whether they can be read, and what is in them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ...catalogue import evidence, loading
from ...catalogue import packs as third_party
from ...catalogue.data_files import data_file, evidence_file, manifest
from ...errors import HotfixError
from ...matching import fingerprints
from ...model import Patch
from .answer import DataFile, Problems


def counted_files(packs: str | None, problems: Problems) -> tuple[dict[str, DataFile], tuple[Patch, ...]]:
    """The data files of this package; and the patches that may be named, as far as they can be read."""
    patches: tuple[Patch, ...] = ()

    def of_manifest() -> int:
        nonlocal patches
        patches = loading.load()
        return len(patches)

    ways: dict[str, tuple[Path, Callable[[], int]]] = {
        "patches": (manifest(), of_manifest),
        "fingerprints": (data_file("fingerprints.json"), _releases),
        "proven": (data_file("proven.json"), _pairs),
        "evidence": (evidence_file(), lambda: len(evidence.trainings()["proofs"])),
    }
    files = {}
    for name, (path, count) in ways.items():
        its = DataFile(path=str(path), sha256=None, count=None)
        try:
            its["count"] = count()
            its["sha256"] = hashlib.sha256(path.read_bytes()).hexdigest()
        except HotfixError as error:
            problems.add(str(error), "install trl_hotfix again, or mend the file if it is yours")
        except OSError as error:
            problems.add(f"{path} cannot be read: {error.strerror}", "install trl_hotfix again")
        files[name] = its
    try:
        patches += loading.known(third_party.named(packs, os.environ))[len(patches) :] if patches else ()
    except HotfixError as error:
        problems.add(str(error), "correct the name, or leave the pack out")
    return files, patches


def _releases() -> int:
    return len(fingerprints.bodies().releases)


def _pairs() -> int:
    return sum(len(each["releases"]) for each in evidence.proven().values())
