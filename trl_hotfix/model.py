"""The shared types. What crosses the border of a module is one of these, or made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import date
from enum import Enum
from types import ModuleType
from typing import Any

from msgspec import Struct


class Severity(str, Enum):
    """What the bug does to a run, worst first."""

    WRONG_GRADIENT = "wrong-gradient"
    WRONG_LOSS = "wrong-loss"
    DATA_LOSS = "data-loss"
    WRONG_METRIC = "wrong-metric"
    CRASH = "crash"
    WASTED_COMPUTE = "wasted-compute"
    DIAGNOSIS = "diagnosis"


class State(str, Enum):
    """Where a patch stands in this process."""

    DISABLED = "disabled"
    RETIRED = "retired"
    SKIPPED = "skipped"
    PENDING = "pending"
    CONFLICTED = "conflicted"
    FAILED = "failed"
    APPLIED = "applied"
    DISPLACED = "displaced"
    UNREACHED = "unreached"
    REVERTED = "reverted"


class Reason(str, Enum):
    """Why a patch stands there. The slugs are stable; docs/reference.md says what to do about each."""

    SWITCHED_OFF = "switched-off"
    NOT_SELECTED = "not-selected"
    EXCLUDED = "excluded"
    DEFAULT_OFF = "default-off"
    FIXED_UPSTREAM = "fixed-upstream"
    NO_TRL = "no-trl"
    TRL_VERSION = "trl-version"
    REQUIREMENT = "requirement"
    MISSING_TARGET = "missing-target"
    ALREADY_FIXED = "already-fixed"
    UNKNOWN_BODY = "unknown-body"
    NOT_REPRODUCED = "not-reproduced"
    APPLIES = "applies"
    BODY_DECIDES = "body-decides"
    NOT_IMPORTED = "not-imported"
    FOREIGN_WRAPPER = "foreign-wrapper"
    SELF_TEST = "self-test"
    SELF_TEST_ERROR = "self-test-error"
    INSTALL_ERROR = "install-error"
    PROVEN = "proven"
    REPLACED = "replaced"
    DELETED = "deleted"
    WRAPPER_ERROR = "wrapper-error"
    OVERRIDDEN = "overridden"
    COMPILED = "compiled"
    BY_REQUEST = "by-request"


DEGRADED = {
    (State.SKIPPED, Reason.MISSING_TARGET),
    (State.SKIPPED, Reason.UNKNOWN_BODY),
    (State.SKIPPED, Reason.NOT_REPRODUCED),
    *((State.CONFLICTED, reason) for reason in Reason),
    *((State.FAILED, reason) for reason in Reason),
    *((State.DISPLACED, reason) for reason in Reason),
    *((State.UNREACHED, reason) for reason in Reason),
}
"""States of a patch that should be on here and is not: a WARNING by default, an exception under strict."""

Evidence = Mapping[str, Any]
"""What was seen: JSON values only."""

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's protocol: ``wrapper(wrapped, instance, args, kwargs)``; in a patch that has options also ``options=``."""

Options = Mapping[str, str]
"""For each option of a patch, the choice that is taken."""


class Verdict(str, Enum):
    """What a self-test says about the release in front of it."""

    REPRODUCED = "reproduced"
    FIXED = "fixed"
    ABSENT = "absent"


class Outcome(Struct, frozen=True):
    """The answer of a self-test: the verdict and the numbers it saw.

    ``absent`` is for a release in which the bug cannot show: other code stands there, or something fails before it.
    """

    verdict: Verdict
    numbers: Evidence = {}

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict.value, **self.numbers}


SelfTest = Callable[[ModuleType], Outcome]
"""``self_test(leaf)``: given the leaf module whose targets are tested, calls the real installed method.

In a patch that has options also ``options=``."""


class Upstream(Struct, frozen=True, forbid_unknown_fields=True):
    """Where TRL's own thread and fix are: numbers of issues and pull requests, and the first fixed release."""

    issue: int | tuple[int, ...] | None = None
    fix: int | tuple[int, ...] | None = None
    fixed_in: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"issue": _plain(self.issue), "fix": _plain(self.fix), "fixed_in": self.fixed_in}


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    """One method or function of TRL that a patch wraps.

    ``trl`` narrows the patch's range to the releases where this target has the bug. ``traced`` marks a target that runs
    inside a compiled region, where Dynamo must see a plain function.
    """

    module: str
    attribute: str
    wrapper: str
    trl: str | None = None
    traced: bool = False

    @property
    def name(self) -> str:
        return f"{self.module}:{self.attribute}"


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """What a user may choose in a patch: each choice with what it means, and the one that is taken otherwise."""

    choices: Mapping[str, str]
    default: str


class Hit(Struct, frozen=True, forbid_unknown_fields=True):
    """One way into a bug: the trainers, by their names without ``Trainer``, and what their arguments are then.

    All of ``when`` must hold (see ``conditions``). ``depends`` is what no script says, so that nobody can tell from
    one. ``trl`` narrows the patch's range, as for a target. ``*`` among the trainers is any of TRL's.
    """

    trainers: tuple[str, ...]
    symptom: str
    when: Mapping[str, Any] = {}
    depends: str | None = None
    trl: str | None = None


class Patch(Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream bug and its repair, as declared in ``patches.yaml``.

    ``not_repaired`` says what of the bug is left as it is. ``review_by`` is for a bug that is open in the newest
    release: the day by which somebody looks whether it still is.
    """

    id: str
    revision: int
    title: str
    severity: Severity
    trl: str
    upstream: Upstream
    why: str
    how: str
    targets: tuple[Target, ...]
    self_test: str
    not_repaired: str | None = None
    requires: Mapping[str, str] = {}
    default: bool = True
    options: Mapping[str, Option] = {}
    review_by: date | None = None
    hits: tuple[Hit, ...] = ()

    def chosen(self, options: Options) -> dict[str, str]:
        """Every option of this patch, with the choice in ``options`` or else the default."""
        return {name: options.get(name, option.default) for name, option in self.options.items()}

    def every_choice(self) -> list[dict[str, str]]:
        """All combinations of choices, that of the defaults first; one empty combination where there are no options."""
        first = self.chosen({})
        every = itertools.product(*(option.choices for option in self.options.values()))
        others = (dict(zip(self.options, choices, strict=True)) for choices in every)
        return [first, *(each for each in others if each != first)]

    def range_of(self, target: Target) -> str:
        """The TRL versions in which ``target`` has the bug."""
        return target.trl or self.trl


class Decision(Struct, frozen=True):
    """A state with its reason and the evidence for it."""

    state: State
    reason: Reason
    evidence: Evidence = {}

    @property
    def degraded(self) -> bool:
        return (self.state, self.reason) in DEGRADED


def _plain(numbers: int | tuple[int, ...] | None) -> int | list[int] | None:
    return list(numbers) if isinstance(numbers, tuple) else numbers
