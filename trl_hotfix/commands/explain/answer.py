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
    """``state`` is "known" for a bug without a repair: its ``revision`` and ``how`` are null, its ``targets`` empty.

    ``when`` says how a run hits the bug: a line for each way, by trainer. ``layer`` is the distribution that has it,
    null: TRL. ``fixed_in`` is the first release of TRL with the fix, and ``fixed_in_layers`` the first without the bug
    of each other distribution; ``>0.18.3`` if only 0.18.3 has it.
    ``retrain`` answers whether a model that was trained with the bug must be trained again.
    """

    trl_hotfix: str
    id: str
    revision: int | None
    title: str
    severity: str
    harm: str | None
    trl: str
    requires: dict[str, str]
    review_by: str | None
    layer: str | None
    fixed_in: str | None
    fixed_in_layers: dict[str, str]
    links: list[str]
    why: str
    when: list[str]
    how: str | None
    not_repaired: str | None
    retrain: str | None
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
