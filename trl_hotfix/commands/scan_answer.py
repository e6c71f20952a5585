"""The shape of ``scan --json``."""

from __future__ import annotations

from typing import TypedDict


class Bug(TypedDict):
    """A bug that is hit, or that the script may hit. ``lines`` are those of the arguments that decide.

    ``positions`` has them in words, with the cell in a notebook. ``repair`` of trl_hotfix: "by default", "if named" or
    "none"; ``fixed_in`` is the first release of TRL with the fix, if there is one.
    """

    id: str
    title: str
    severity: str
    symptom: str
    lines: list[int]
    positions: list[str]
    because: list[str]
    unknown: list[str]
    on_by_default: bool
    repair: str
    fixed_in: str | None


class Trainer(TypedDict):
    """A trainer of the script. ``rest`` is the number of known bugs that it does not hit."""

    trainer: str
    called: str
    line: int
    position: str
    hits: list[Bug]
    cannot_tell: list[Bug]
    rest: int


class File(TypedDict):
    """A file that was scanned. ``error``: why it cannot be scanned; then it has no trainers."""

    file: str
    error: str | None
    trainers: list[Trainer]


class Answer(TypedDict):
    """What ``scan --json`` prints. Files of a folder that make no trainer are left out.

    ``model``, ``dataset``, ``accelerate`` and ``deepspeed`` are the files that were told, or null.
    """

    trl_hotfix: str
    trl: str
    model: str | None
    dataset: str | None
    accelerate: str | None
    deepspeed: str | None
    scanned: int
    files: list[File]
