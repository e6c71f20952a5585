"""The shape of ``explain --json``."""

from __future__ import annotations

from typing import Any, TypedDict


class TargetAnswer(TypedDict):
    module: str
    attribute: str
    trl: str
    called: str | None


class OptionAnswer(TypedDict):
    choices: dict[str, str]
    default: str


class StepAnswer(TypedDict):
    gate: str
    found: str
    passed: bool | None


class ProofAnswer(TypedDict):
    release: str
    stack: str
    verdict: str
    runs: dict[str, dict[str, Any]]


class ParityAnswer(TypedDict):
    release: str
    fixed_release: str
    loss_difference: float
    gradient_difference: float


class Answer(TypedDict):
    trl_hotfix: str
    id: str
    revision: int
    title: str
    severity: str
    trl: str
    requires: dict[str, str]
    review_by: str | None
    fixed_in: str | None
    links: list[str]
    why: str
    how: str
    not_repaired: str | None
    notes: str
    options: dict[str, OptionAnswer]
    targets: list[TargetAnswer]
    proven_on: list[str]
    proofs: list[ProofAnswer]
    parity: list[ParityAnswer]
    turn_off: list[str]
    installed: str | None
    state: str
    reason: str
    because: str
    trail: list[StepAnswer]
    differences: dict[str, str]
