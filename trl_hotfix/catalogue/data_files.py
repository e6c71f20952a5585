"""The paths of this package's data files, and a function to read one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from ..errors import DamagedError
from . import condensed, evidence_file

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """Return the checkout that this package runs from, or None if it is an installed one."""
    folder = PACKAGE.parent
    markers = ("pyproject.toml", "patches.yaml")
    return folder if all((folder / name).is_file() for name in markers) else None


def manifest() -> Path:
    """Return the path of a checkout's ``patches.yaml``, or of the ``patches.json`` that a wheel has of it."""
    folder = checkout()
    return data_file("patches.json") if folder is None else folder / "patches.yaml"


def known_bugs_file() -> Path:
    """Return the path of ``known.yaml``, or of the ``known.json`` that a wheel has of it. It is beside the manifest."""
    return manifest().with_stem("known")


def data_file(name: str) -> Path:
    """Return the path of a file that the build of a wheel makes. A checkout has what it is made of."""
    return PACKAGE / "data" / name


def evidence_folder() -> Path:
    """Return the folder of ``<id>.json`` of a checkout."""
    return PACKAGE.parent / "evidence"


def read_data(name: str, kind: Any) -> Any:
    """Return ``fingerprints.json`` or ``proven.json`` as ``kind``. Raises ``DamagedError``."""
    if checkout() is None:
        return decoded(data_file(name), kind)
    try:
        return msgspec.convert(_condensed()[name], kind)
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (ValueError, msgspec.MsgspecError) as error:
        raise DamagedError(evidence_folder(), error) from error


@functools.cache
def _condensed() -> dict[str, Any]:
    files = evidence_file.paths(evidence_folder())
    return condensed.condensed(of_evidence(path, evidence_file.bodies_of, dict[str, Any]) for path in files)


def of_evidence(path: Path, part: Callable[[evidence_file.Document], Any], kind: Any) -> Any:
    """Return a part of what an evidence file of a checkout has on record, as ``kind``. Raises ``DamagedError``."""
    document = decoded(path, evidence_file.Document)
    try:
        return msgspec.convert(part(document), kind)
    except (LookupError, ValueError, msgspec.MsgspecError) as error:
        raise DamagedError(path, error) from error


def decoded(path: Path, kind: Any, distribution: str = "trl_hotfix") -> Any:
    """Return the content of a JSON file of the package, or of a pack, as ``kind``. Raises ``DamagedError``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(path, error, distribution) from error
