"""The types that the rooms of the package share. Modules exchange only these types and values made of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from datetime import date
from enum import Enum, IntEnum
from types import ModuleType
from typing import Any

from msgspec import Struct


class Severity(str, Enum):
    """The effect of a bug on a run, worst first."""

    WRONG_GRADIENT = "wrong-gradient"
    WRONG_LOSS = "wrong-loss"
    DATA_LOSS = "data-loss"
    WRONG_METRIC = "wrong-metric"
    CRASH = "crash"
    WASTED_COMPUTE = "wasted-compute"
    DIAGNOSIS = "diagnosis"


class Harm(str, Enum):
    """What a run with the bug leaves behind."""

    SCALE = "scale"
    OBJECTIVE = "objective"
    DATA = "data"
    WEIGHTS = "weights"
    METRIC = "metric"
    EVALUATION = "evaluation"
    CRASH = "crash"


class State(str, Enum):
    """The state of a patch in this process."""

    DISABLED = "disabled"
    RETIRED = "retired"
    SKIPPED = "skipped"
    PENDING = "pending"
    CONFLICTED = "conflicted"
    FAILED = "failed"
    OBSERVED = "observed"
    APPLIED = "applied"
    DISPLACED = "displaced"
    UNREACHED = "unreached"
    REVERTED = "reverted"


class Reason(str, Enum):
    """The reason for the state of a patch. The slugs are stable; docs/reference.md says what to do about each."""

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
    REPRODUCED = "reproduced"
    PROVEN = "proven"
    REPLACED = "replaced"
    DELETED = "deleted"
    WRAPPER_ERROR = "wrapper-error"
    OVERRIDDEN = "overridden"
    MADE_BEFORE = "made-before"
    NOT_INHERITED = "not-inherited"
    NOT_CALLED = "not-called"
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
"""The states of a patch that should be on here and is not: a WARNING by default, an exception under strict."""

Evidence = Mapping[str, Any]
"""The observations behind a decision. The values are JSON values."""

Wrapper = Callable[[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]], Any]
"""wrapt's protocol: ``wrapper(wrapped, instance, args, kwargs)``; in a patch that has options also ``options=``.

A function that is marked with ``@wrapper`` takes one ``Call`` in their place."""

Options = Mapping[str, str]
"""The choice for each option of a patch."""


class Strict(IntEnum):
    """What ends a run. Each level includes those before it."""

    NOTHING = 0
    RUN = 1
    """A bug that this run hits, or may hit, and whose patch is not on, or does not reach its trainer."""
    ALL = 2
    """A patch that should be on and is not, whatever this run is; also when TRL's module is imported."""


class Verdict(str, Enum):
    """The verdict of a self-test on the installed release."""

    REPRODUCED = "reproduced"
    FIXED = "fixed"
    ABSENT = "absent"


class Outcome(Struct, frozen=True):
    """The result of a self-test: the verdict and the numbers it measured.

    ``absent`` is for a release in which the bug cannot occur: it has other code, or fails before it reaches the bug.
    """

    verdict: Verdict
    numbers: Evidence = {}

    def to_dict(self) -> dict[str, Any]:
        return {"verdict": self.verdict.value, **self.numbers}


SelfTest = Callable[[ModuleType], Outcome]
"""``self_test(module)`` calls the real installed methods of a module that has targets.

In a patch that has options it also takes ``options=``."""


class Upstream(Struct, frozen=True, forbid_unknown_fields=True):
    """The numbers of TRL's own issues and pull requests, and the first fixed release."""

    issue: int | tuple[int, ...] | None = None
    fix: int | tuple[int, ...] | None = None
    fixed_in: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {"issue": _plain(self.issue), "fix": _plain(self.fix), "fixed_in": self.fixed_in}


class Called(str, Enum):
    """The moment of a run at which TRL calls a target.

    A trainer of the target's class is one whose class has the target and does not override it; a constructor that
    overrides it and calls it counts too.
    """

    CONSTRUCTION = "construction"
    """The constructor of every trainer of the class calls it, and nothing calls it later."""

    SOME_CONSTRUCTIONS = "some constructions"
    """The constructor calls it with certain arguments only, or of certain trainers only; nothing calls it later."""

    PREPARATION = "preparation"
    """It is called where a dataset or a dataloader is made: in the constructor, when training or an evaluation asks for
    its first batch, or when ``evaluate()`` is given a new dataset. With certain arguments it may not be called."""

    DATA = "data"
    """It is called where a batch is collated. A collator of the user's own may take its place."""

    STEP = "step"
    """Every optimizer step of every trainer of the class calls it, whatever its arguments; evaluation may call it too.

    Strictness relies on it: what a loss type, the Liger kernel or an adapter leaves out is ``some steps``.
    """

    SOME_STEPS = "some steps"
    """Training calls it after its first batch, with certain arguments only or not in every step. Evaluation and
    preparation may call it too."""

    EVALUATION = "evaluation"
    """It is called in evaluations, and at no other moment."""

    GENERATION = "generation"
    """It is called where the trainer generates completions, in training or evaluation; not in the steps that reuse
    completions, nor with certain arguments, such as another way to generate."""

    SAVE = "save"
    """It is called when a checkpoint or the model is saved."""

    RESUME = "resume"
    """It is called when training continues from a checkpoint."""

    IMPORT = "import"
    """It is called while the modules of TRL are imported."""


class Target(Struct, frozen=True, forbid_unknown_fields=True):
    """One method or function of TRL that a patch wraps.

    ``trl`` narrows the patch's range to the releases where this target has the bug. ``traced`` marks a target that runs
    inside a compiled region, where Dynamo must see a plain function. ``called`` is None if it is not declared, which a
    pack is free to do.
    """

    module: str
    attribute: str
    wrapper: str
    trl: str | None = None
    traced: bool = False
    called: Called | None = None

    @property
    def name(self) -> str:
        return f"{self.module}:{self.attribute}"


class Option(Struct, frozen=True, forbid_unknown_fields=True):
    """An option of a patch: its choices, each with its meaning, and the default."""

    choices: Mapping[str, str]
    default: str


class Hit(Struct, frozen=True, forbid_unknown_fields=True):
    """One way to hit a bug: the trainers, by their names without ``Trainer``, and the conditions on their arguments.

    All conditions in ``when`` must hold (see ``conditions``). ``depends`` names a further condition that cannot be read
    from a script, and ``facts`` says the same by conditions on the model's files and the launch (``catalogue.facts``).
    ``trl`` narrows the patch's range, as for a target. ``*`` among the trainers is any of TRL's.
    """

    trainers: tuple[str, ...]
    symptom: str
    when: Mapping[str, Any] = {}
    depends: str | None = None
    facts: Mapping[str, Any] = {}
    trl: str | None = None


class Patch(Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream bug and its repair, as declared in ``patches.yaml``.

    ``not_repaired`` describes the part of the bug that the patch leaves. ``review_by`` is for a bug that is open in the
    newest release: the day by which newer releases must be checked for it. ``formerly`` are the ids that the patch
    had before; a user may still name it so. ``layer`` is the distribution in ``requires`` that has the bug, if it is
    not TRL. ``retrain`` answers whether a model that was trained with the bug must be trained again.
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
    layer: str | None = None
    harm: Harm | None = None
    retrain: str | None = None
    default: bool = True
    options: Mapping[str, Option] = {}
    review_by: date | None = None
    hits: tuple[Hit, ...] = ()
    formerly: tuple[str, ...] = ()

    def chosen(self, options: Options) -> dict[str, str]:
        """Return every option of this patch, with the choice in ``options`` or else the default."""
        return {name: options.get(name, option.default) for name, option in self.options.items()}

    def every_choice(self) -> list[dict[str, str]]:
        """Return all combinations of choices, the defaults first. Without options there is one empty combination."""
        defaults = self.chosen({})
        products = itertools.product(*(option.choices for option in self.options.values()))
        combinations = (dict(zip(self.options, choices, strict=True)) for choices in products)
        return [defaults, *(combination for combination in combinations if combination != defaults)]

    def range_of(self, target: Target) -> str:
        """Return the range of TRL versions in which ``target`` has the bug."""
        return target.trl or self.trl


class KnownBug(Struct, frozen=True, forbid_unknown_fields=True):
    """One upstream bug that has no repair here, as declared in ``known.yaml``. It is never applied.

    Its fields mean what they mean in a patch. ``hits`` is not empty: telling who is hit is all that an entry is for.
    """

    id: str
    title: str
    severity: Severity
    trl: str
    upstream: Upstream
    why: str
    hits: tuple[Hit, ...]
    requires: Mapping[str, str] = {}
    layer: str | None = None
    harm: Harm | None = None
    retrain: str | None = None
    review_by: date | None = None


Bug = Patch | KnownBug
"""A known bug of TRL, with a repair or without."""


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
