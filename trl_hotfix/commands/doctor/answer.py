"""The shape of ``doctor --json``, and a collection of the problems."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypedDict

from ...errors import HotfixError


class Problem(TypedDict):
    problem: str
    remedy: str


class Python(TypedDict):
    version: str
    executable: str
    platform: str
    flags: list[str]
    """The options of this Python that decide which .pth files and variables it reads: -S, -E, -I, -P, -s."""


class Trl(TypedDict):
    version: str | None
    supported: bool
    kind: str | None
    """``release``, or else ``development version``, ``fork`` (a local version), ``editable checkout``."""
    folder: str | None
    others: list[str]
    """The folders of further TRLs on the path."""


class Hook(TypedDict):
    """``problem``: why TRL_HOTFIX=1 cannot work in this Python. ``effective``: whether a fresh one waited for TRL."""

    problem: str | None
    effective: bool
    folder: str | None
    said: list[str]


class Variable(TypedDict):
    name: str
    value: str
    problem: str | None


class Patcher(TypedDict):
    name: str
    version: str
    does: str
    look: str


class PthFile(TypedDict):
    folder: str
    name: str
    ours: bool


class DataFile(TypedDict):
    """``count``: the number of patches, bugs without one, releases with known bodies, cells, or trainings."""

    path: str
    sha256: str | None
    count: int | None


class Pack(TypedDict):
    name: str
    release: str
    named: bool


class Answer(TypedDict):
    trl_hotfix: str
    folder: str
    problems: list[Problem]
    python: Python
    trl: Trl
    packages: dict[str, str | None]
    hook: Hook
    variables: list[Variable]
    patchers: list[Patcher]
    finders: list[str]
    pth: list[PthFile]
    files: dict[str, DataFile]
    packs: list[Pack]
    applies: int | None
    digest: str | None


@dataclass(slots=True)
class Problems:
    """The problems so far, without duplicates, and the first error of a setting that stops ``import trl``."""

    entries: list[Problem] = field(default_factory=list)
    stops_import: HotfixError | None = None

    def note(self, error: HotfixError) -> None:
        """Keep the error if it is the first that stops ``import trl``."""
        if error.stops_import and self.stops_import is None:
            self.stops_import = error

    def add(self, problem: str, remedy: str) -> None:
        entry = Problem(problem=problem, remedy=remedy)
        if entry not in self.entries:
            self.entries.append(entry)
