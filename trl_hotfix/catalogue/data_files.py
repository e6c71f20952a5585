"""The paths of this package's data files, and a function to read one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..errors import DamagedError

PACKAGE = Path(__file__).resolve().parents[1]


def checkout() -> Path | None:
    """Return the checkout that this package is run from, or None if it is an installed one."""
    folder = PACKAGE.parent
    markers = ("pyproject.toml", "patches.yaml")
    return folder if all((folder / name).is_file() for name in markers) else None


def manifest() -> Path:
    """Return the path of ``patches.yaml``: at the top of the checkout, or in the installed package."""
    return (checkout() or PACKAGE) / "patches.yaml"


def data_file(name: str) -> Path:
    """Return the path of a file that is built, checked and shipped: ``fingerprints.json``, ``proven.json``."""
    return PACKAGE / "data" / name


def evidence_file() -> Path:
    """Return the path of the evidence: in the checkout that this package is run from, or in the installed package."""
    folder = checkout()
    return folder / "evidence" / "matrix.json" if folder is not None else PACKAGE / "evidence.json"


def decoded(path: Path, kind: Any, distribution: str = "trl_hotfix") -> Any:
    """Return the content of a JSON file of the package, or of a pack, as ``kind``. Raises ``DamagedError``."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise DamagedError(path, error, distribution) from error
