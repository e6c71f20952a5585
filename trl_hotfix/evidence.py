"""What the proof bench has seen: ``evidence/matrix.json``, which ships with the package, in words."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from packaging.version import Version

from . import packs
from .errors import DamagedError
from .fingerprint import bodies
from .model import Patch

Cell = Mapping[str, Any]
"""One patch on one release: ``patch, revision, release, stack, versions, verdict, why, leaves, bodies``."""


_Version = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*(rc\d+)?$")]


class _Read(TypedDict):
    """What is read of a cell."""

    patch: str
    revision: int
    release: _Version
    verdict: str
    bodies: dict[str, str | None]


class Proof(TypedDict):
    """What the proof of a patch said on one release: ``runs`` has, for each training run, its verdict and numbers."""

    patch: str
    revision: int
    release: _Version
    stack: str
    verdict: str
    runs: dict[str, dict[str, Any]]


class Parity(TypedDict):
    """How far the patched release is from the first fixed one: the differences of the loss and of the gradients."""

    patch: str
    release: _Version
    stack: str
    fixed_release: _Version
    loss_difference: float
    gradient_difference: float


class _Cells(TypedDict):
    cells: list[_Read]


class _Trainings(TypedDict):
    proofs: list[Proof]
    parity: list[Parity]


def file() -> Path:
    """Where the evidence is: in the installed package, or in the checkout that it is run from."""
    here = Path(__file__).resolve().parent
    checkout = here.parent / "evidence" / "matrix.json"
    return checkout if (here.parent / "pyproject.toml").is_file() else here / "evidence.json"


@functools.cache
def cells() -> Mapping[str, Sequence[_Read]]:
    """What the self-tests said, by patch; empty where the package was built without it. Raises ``DamagedError``."""
    read: _Cells | None = _decoded(_Cells)
    found: dict[str, list[_Read]] = {}
    for cell in read["cells"] if read is not None else ():
        found.setdefault(cell["patch"], []).append(cell)
    return found


@functools.cache
def trainings() -> _Trainings:
    """The proofs on record and the comparisons with fixed releases. Raises ``DamagedError``."""
    read: _Trainings | None = _decoded(_Trainings)
    return read if read is not None else {"proofs": [], "parity": []}


def _decoded(part: type) -> Any:
    """A part of the file, None if there is none: ``--list`` shows the cells only, and reading all takes longer."""
    its = file()
    if not its.is_file():
        return None
    try:
        return msgspec.json.decode(its.read_bytes(), type=part)
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedError(its, error) from error


def holds(cell: Cell, patch: Patch) -> bool:
    """Is the cell about the patch as it is now, and about the bodies that the release has? Else it is stale."""
    known = bodies()
    same = all(known.at(target, cell["release"]) in (None, body) for target, body in cell["bodies"].items())
    return bool(cell["revision"] == patch.revision) and same


def proven_on(patch: Patch) -> tuple[str, ...]:
    """The releases, oldest first, on which ``patch`` as it is now was seen red, green and red."""
    its = cells().get(patch.id, ())
    proven = {cell["release"] for cell in its if cell["verdict"] == "proven" and holds(cell, patch)}
    failed = {cell["release"] for cell in its if cell["verdict"] not in ("proven", "absent")}
    return tuple(sorted(proven - failed, key=Version))


def proofs_of(patch: Patch) -> list[Proof]:
    """What trainings on real releases have shown of ``patch`` as it is now, oldest release first."""
    its = (each for each in trainings()["proofs"] if each["patch"] == patch.id and each["revision"] == patch.revision)
    return sorted(its, key=lambda each: (Version(each["release"]), each["stack"]))


def parity_of(patch: Patch) -> list[Parity]:
    """The comparisons with the first fixed release."""
    return [each for each in trainings()["parity"] if each["patch"] == patch.id]


def in_words(patch: Patch) -> str:
    """``proven on 0.11.0 ... 0.11.4 (5 releases)``, or that nothing is on record."""
    if pack := packs.pack_of(patch.id):
        return f"of {packs.find(pack).release}"
    releases = proven_on(patch)
    if not releases:
        return "not proven yet"
    if len(releases) == 1:
        return f"proven on {releases[0]}"
    return f"proven on {releases[0]} ... {releases[-1]} ({len(releases)} releases)"
