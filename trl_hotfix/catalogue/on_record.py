"""The results of the proof bench, and a summary of them in words.

``--list`` reads what is proven of all patches. The trainings of a patch stand in its own evidence file in a checkout,
and in ``data/trainings.json`` of an installed package.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Annotated, Any, TypedDict

import msgspec
from packaging.version import Version

from ..model import Patch
from . import evidence_file, packs
from .data_files import checkout, data_file, decoded, evidence_folder, of_evidence, read_data

_Version = Annotated[str, msgspec.Meta(pattern=r"^\d+(\.\d+)*(rc\d+)?$")]


class Proven(TypedDict):
    """The releases, oldest first, on which this revision of a patch was red, green and red."""

    revision: int
    releases: list[_Version]


class Proof(TypedDict):
    """The result of a patch's proof on one release. ``runs`` has the verdict and the numbers of each training run."""

    release: _Version
    stack: str
    verdict: str
    runs: dict[str, dict[str, Any]]


class Parity(TypedDict):
    """The differences of loss and gradients between the patched release and the first fixed one."""

    release: _Version
    stack: str
    fixed_release: _Version
    loss_difference: float
    gradient_difference: float


class _Trainings(TypedDict):
    revision: int
    proofs: list[Proof]
    parity: list[Parity]


class _Result(TypedDict):
    """A result that some proofs of a patch have, with their releases by stack."""

    verdict: str
    runs: dict[str, dict[str, Any]]
    places: dict[str, list[_Version]]


class _Condensed(TypedDict):
    """What ``data/trainings.json`` has of a patch."""

    revision: int
    results: list[_Result]
    parity: list[Parity]


@functools.cache
def proven() -> Mapping[str, Proven]:
    """Return what the self-tests have proven, by patch. Raises ``DamagedError``."""
    by_patch: Mapping[str, Proven] = read_data("proven.json", dict[str, Proven])
    return by_patch


@functools.cache
def trainings(patch_id: str) -> _Trainings:
    """Return the proofs on record of a patch and its comparisons with fixed releases. Raises ``DamagedError``.

    Both are empty for a patch without evidence, such as one of a pack.
    """
    empty: _Trainings = {"revision": 0, "proofs": [], "parity": []}
    if checkout() is None:
        return _all_trainings().get(patch_id, empty)
    path = evidence_folder() / f"{patch_id}.json"
    if not path.is_file():
        return empty
    recorded: _Trainings = of_evidence(path, evidence_file.trainings_of, _Trainings)
    return recorded


@functools.cache
def _all_trainings() -> Mapping[str, _Trainings]:
    by_patch: Mapping[str, _Condensed] = decoded(data_file("trainings.json"), dict[str, _Condensed])
    return {
        patch_id: {
            "revision": of_patch["revision"],
            "proofs": [
                {"release": release, "stack": stack, "verdict": result["verdict"], "runs": result["runs"]}
                for result in of_patch["results"]
                for stack, releases in result["places"].items()
                for release in releases
            ],
            "parity": of_patch["parity"],
        }
        for patch_id, of_patch in by_patch.items()
    }


def proven_on(patch: Patch) -> tuple[str, ...]:
    """Return the releases, oldest first, on which the current revision of ``patch`` was red, green and red."""
    recorded = proven().get(patch.id)
    return tuple(recorded["releases"]) if recorded is not None and recorded["revision"] == patch.revision else ()


def proofs_of(patch: Patch) -> list[Proof]:
    """Return the proofs of the current revision of ``patch`` on real releases, oldest release first."""
    record = trainings(patch.id)
    proofs = record["proofs"] if record["revision"] == patch.revision else []
    return sorted(proofs, key=lambda proof: (Version(proof["release"]), proof["stack"]))


def parity_of(patch: Patch) -> list[Parity]:
    """Return the comparisons of ``patch`` with the first fixed release."""
    return trainings(patch.id)["parity"]


def in_words(patch: Patch) -> str:
    """Return ``proven on 0.11.0 ... 0.11.4 (5 releases)``, ``not proven yet``, or the release of the patch's pack."""
    if pack := packs.pack_of(patch.id):
        return f"of {packs.find(pack).release}"
    releases = proven_on(patch)
    if not releases:
        return "not proven yet"
    if len(releases) == 1:
        return f"proven on {releases[0]}"
    return f"proven on {releases[0]} ... {releases[-1]} ({len(releases)} releases)"
