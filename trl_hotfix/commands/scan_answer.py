"""The shape of ``scan --json``."""

from __future__ import annotations

from typing import TypedDict

from .accepted import IgnoreProblem


class Bug(TypedDict):
    """A bug that is hit, or that the script may hit. ``lines`` has those of the arguments that decide.

    ``positions`` has the places in words, once each: a cell of a notebook, a line of a config that the command line
    names, or "the command line". ``repair`` of trl_hotfix: "by default", "if named" or
    "none"; ``fixed_in`` is the first release of TRL with the fix, if there is one, and ``fixed_in_layers`` the first
    without the bug of each other distribution; ``layer`` is the distribution that has the bug, null: TRL. ``harm`` is
    what a run with the bug leaves behind, such as "scale".

    ``run_repairs``: whether the run would repair it, by ``--policy`` or the environment; null without ``--policy`` and
    ``--fail-on unrepaired``.
    """

    id: str
    title: str
    severity: str
    harm: str | None
    symptom: str
    lines: list[int]
    positions: list[str]
    because: list[str]
    unknown: list[str]
    on_by_default: bool
    repair: str
    run_repairs: bool | None
    layer: str | None
    fixed_in: str | None
    fixed_in_layers: dict[str, str]


class Accepted(Bug):
    """A bug that the user accepts. ``answer`` is "hit" or "cannot tell"; ``accepted_by`` names the place."""

    answer: str
    reason: str
    accepted_by: str


class Trainer(TypedDict):
    """A trainer of the script. ``rest`` is the number of known bugs that it does not hit.

    ``ask`` is the command that would answer more, with capital letters where a value is missing.
    """

    trainer: str
    called: str
    line: int
    position: str
    hits: list[Bug]
    cannot_tell: list[Bug]
    ask: str | None
    accepted: list[Accepted]
    rest: int


class Unseen(TypedDict):
    """A line from which a trainer of TRL may be made, and why the scan cannot tell more of it."""

    line: int
    position: str
    reason: str


class NotUsed(TypedDict):
    """An argument behind ``--``, with its values, that nothing in the file reads, and why."""

    words: str
    reason: str


class File(TypedDict):
    """A file that was scanned. ``error``: why it cannot be scanned; then it has no trainers.

    ``uncertain`` has what may be more trainers, and ``not_used`` the arguments behind ``--`` that the scan did not use.
    """

    file: str
    error: str | None
    trainers: list[Trainer]
    uncertain: list[Unseen]
    not_used: list[NotUsed]


class Answer(TypedDict):
    """What ``scan --json`` prints. Files of a folder that make no trainer are left out.

    ``model``, ``dataset``, ``accelerate`` and ``deepspeed`` are the files of these options, or null.
    ``ignores`` has the ignores that need a change.
    """

    trl_hotfix: str
    trl: str
    model: str | None
    dataset: str | None
    accelerate: str | None
    deepspeed: str | None
    scanned: int
    files: list[File]
    ignores: list[IgnoreProblem]
