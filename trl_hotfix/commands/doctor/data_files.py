"""Check that the data files of this package can be read, and count their entries."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from ...catalogue import evidence_file, loading, on_record
from ...catalogue import packs as third_party
from ...catalogue.data_files import checkout, data_file, evidence_folder, known_bugs_file, manifest
from ...errors import HotfixError
from ...matching import fingerprints
from ...model import Patch
from .answer import DataFile, Problems


def counted_files(packs: str | None, problems: Problems) -> tuple[dict[str, DataFile], tuple[Patch, ...]]:
    """Return the data files of this package, and the patches of the catalogue and the packs that can be read."""
    patches: tuple[Patch, ...] = ()

    def of_manifest() -> int:
        nonlocal patches
        patches = loading.load()
        return len(patches)

    counters: dict[str, tuple[Path, Callable[[], int]]] = {
        "patches": (manifest(), of_manifest),
        "known": (known_bugs_file(), lambda: len(loading.without_repair())),
        "fingerprints": (_condensed_from("fingerprints.json"), _releases),
        "proven": (_condensed_from("proven.json"), _pairs),
        "evidence": (
            _condensed_from("trainings.json"),
            lambda: sum(len(on_record.trainings(patch.id)["proofs"]) for patch in patches),
        ),
    }
    files = {}
    for name, (path, count) in counters.items():
        entry = DataFile(path=str(path), sha256=None, count=None)
        try:
            entry["count"] = count()
            entry["sha256"] = hashlib.sha256(_content(path)).hexdigest()
        except HotfixError as error:
            problems.add(str(error), "install trl_hotfix again, or mend the file if it is yours")
        except OSError as error:
            problems.add(f"{path} cannot be read: {error.strerror}", "install trl_hotfix again")
        files[name] = entry
    try:
        patches += loading.known(third_party.named(packs, os.environ))[len(patches) :] if patches else ()
    except HotfixError as error:
        problems.add(str(error), "correct the name, or leave the pack out")
    return files, patches


def _condensed_from(name: str) -> Path:
    """Return the file of an installed package, or in a checkout the folder that is condensed to it."""
    return data_file(name) if checkout() is None else evidence_folder()


def _content(path: Path) -> bytes:
    """Return the bytes of a file, or of all evidence files of a folder."""
    files = evidence_file.paths(path) if path.is_dir() else [path]
    return b"".join(file.read_bytes() for file in files)


def _releases() -> int:
    return len(fingerprints.bodies().releases)


def _pairs() -> int:
    return sum(len(proven["releases"]) for proven in on_record.proven().values())
