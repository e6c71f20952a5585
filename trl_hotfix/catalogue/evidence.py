"""What the proof bench has seen, in words.

``proven.json`` has the releases that each patch was seen to repair; ``evidence.json``, which is the evidence whole, is
read for the trainings alone: it is megabytes, and ``--list`` does without.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import msgspec
from packaging.version import Version

from ..model import Patch
from . import packs
from .data_files import data_file, decoded, evidence_file

_Version = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*(rc\d+)?$")]


class Proven(TypedDict):
    """The releases, oldest first, on which this revision of a patch was seen red, green and red."""

    revision: int
    releases: list[_Version]


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


class _Trainings(TypedDict):
    proofs: list[Proof]
    parity: list[Parity]


@functools.cache
def proven() -> Mapping[str, Proven]:
    """By patch, what the self-tests have proven. Raises ``DamagedError``."""
    found: Mapping[str, Proven] = decoded(data_file("proven.json"), dict[str, Proven])
    return found


@functools.cache
def trainings() -> _Trainings:
    """The proofs on record and the comparisons with fixed releases. Raises ``DamagedError``.

    There are none where the package was built without them.
    """
    path = evidence_file()
    read: _Trainings = decoded(path, _Trainings) if path.is_file() else {"proofs": [], "parity": []}
    return read


def proven_on(patch: Patch) -> tuple[str, ...]:
    """The releases, oldest first, on which ``patch`` as it is now was seen red, green and red."""
    its = proven().get(patch.id)
    return tuple(its["releases"]) if its is not None and its["revision"] == patch.revision else ()


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
