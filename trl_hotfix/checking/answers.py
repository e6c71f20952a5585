"""The shape of what a check finds out. ``check --json`` prints it."""

from __future__ import annotations

from typing import Literal, TypedDict

HOLDS, VIOLATED, NOT_ASKED = "holds", "does not hold", "cannot be asked"


class Difference(TypedDict):
    """A difference of two runs. ``apart`` is relative to the larger number. A number that is not finite is null."""

    what: str
    left: float | None
    right: float | None
    apart: float | None


class Relation(TypedDict):
    """A relation of the run, in training or in what is logged.

    ``factor`` is how many times larger the gradient of the first step is, if that is the only difference. ``cause``
    is what explains it: "patch ID", "known ID", "new ID" or "meant FILE:LINE"; ``repaired``: it holds with
    TRL_HOTFIX=1. ``whose``: "yours", "TRL's" or null. ``place`` is what of the user's code makes the difference, or
    where the two runs part first.
    """

    relation: str
    why: str
    setting: str
    part: Literal["training", "metrics"]
    state: str
    reason: str
    differences: list[Difference]
    factor: float | None
    cause: str | None
    repaired: bool
    whose: str | None
    place: str | None


class Bug(TypedDict):
    """A bug of the catalogue that the run hits or may hit. ``narrowed``: it needs what a small run leaves out."""

    id: str
    title: str
    severity: str
    harm: str | None
    answer: str
    symptom: str
    because: list[str]
    unknown: list[str]
    repair: str
    fixed_in: str | None
    narrowed: bool


class Would(TypedDict):
    """What a check would ask, or why it cannot."""

    relation: str
    setting: str
    refused: str


class Answer(TypedDict):
    """What ``check --json`` prints. ``error``: why there are no relations, or null. ``taken``: what the check changed.

    ``cut``: the script failed with few rows of a dataset that it loads.

    ``noted`` has what a reader should know of the runs, such as a reward that a stand-in replaces.
    """

    trl_hotfix: str
    trl: str
    script: str
    trainer: str | None
    of_trl: str | None
    place: str | None
    error: str | None
    cut: bool
    taken: list[str]
    noted: list[str]
    not_checked: list[str]
    would_ask: list[Would]
    bugs: list[Bug]
    relations: list[Relation]
    runs: int
    seconds: float
