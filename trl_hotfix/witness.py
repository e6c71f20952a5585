"""The witness: which trainer called a patched method, in which phase, and in how many of these calls the wrapper acted.

``Here.thread.doing`` says whose work this thread does now, and what that is: a trainer and a phase. Layers of ours on
the trainer's own methods set it and put it back (``patching.phases``). A call of a patched function reads it, and
counts for that trainer. A method of a trainer always counts for this trainer. What no trainer calls, such as another
thread, counts for the process.

Trainers are held weakly, and there is no lock. A finaliser, a signal handler or a fork may come at any line, and would
wait for it for ever.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from typing import Any

from .by_identity import ByIdentity

Options = tuple[tuple[str, str], ...]


class Phase(str, Enum):
    """What a trainer is doing when a call comes."""

    CONSTRUCT = "construct"
    TRAIN = "train"
    """In ``train()``, and not in a step: the loop, its data and its callbacks."""
    STEP = "step"
    """In ``training_step()``: a micro-batch, forward and backward."""
    EVALUATE = "evaluate"
    OTHER = "other"


class Witnessed:
    """What is counted: one target, with one patch in one revision, with these options. ``observe``: only observed.

    There is one object for each, so that its identity finds a count. ``sites`` has the sites with its layer, by id.
    """

    __slots__ = ("observe", "options", "patch", "revision", "sites", "target")

    def __init__(self, patch: str, target: str, revision: int, options: Options = (), *, observe: bool = False) -> None:
        self.patch, self.target, self.revision, self.options, self.observe = patch, target, revision, options, observe
        self.sites: set[int] = set()

    @property
    def key(self) -> tuple[str, str, int, Options, bool]:
        return self.patch, self.target, self.revision, self.options, self.observe


class Count:
    """The calls of one target by one trainer in one phase, and those in which the wrapper acted.

    ``unseen`` are the calls that prepared something for later, such as a tokenizer, which has not been used here.
    """

    __slots__ = ("acted", "called", "unseen", "witnessed")

    def __init__(self, called: int = 0, acted: int = 0, unseen: int = 0, witnessed: Witnessed | None = None) -> None:
        self.called, self.acted, self.unseen, self.witnessed = called, acted, unseen, witnessed

    def __add__(self, other: Count) -> Count:
        return Count(self.called + other.called, self.acted + other.acted, self.unseen + other.unseen)

    def __sub__(self, other: Count) -> Count:
        return Count(self.called - other.called, self.acted - other.acted, self.unseen - other.unseen)

    def of_copy(self) -> Count:
        """Return the count of what this thread does now, which is the work of a copy of this trainer."""
        return self if self.witnessed is None else Here.thread.doing.of(self.witnessed)


_NONE = Count()
_changes = 0
"""How often a layer has been put on a target, or taken off."""

_all: dict[tuple[str, str, int, Options, bool], Witnessed] = {}


def witnessed(patch: str, target: str, revision: int, options: Options = (), *, observe: bool = False) -> Witnessed:
    """Return what the calls of the target ``module:attribute`` with this patch are counted by."""
    new = Witnessed(patch, target, revision, options, observe=observe)
    return _all.setdefault(new.key, new)


def stands(each: Witnessed, site: Any, *, on: bool) -> None:
    """Note that the layer of a site is on, or off."""
    global _changes
    if on:
        each.sites.add(id(site))
    else:
        each.sites.discard(id(site))
    _changes += 1


def every_target() -> list[Witnessed]:
    """Return what has had a layer in this process, or has one."""
    return list(_all.values())


def standing() -> set[Witnessed]:
    """Return what has a layer now."""
    return {each for each in every_target() if each.sites}


class Doing:
    """A trainer in one phase, with its counts. ``key`` is the trainer's id, which holds while its own method runs."""

    __slots__ = ("counts", "key", "phase")

    def __init__(self, key: int, phase: Phase) -> None:
        self.key, self.phase = key, phase
        self.counts: dict[Witnessed, Count] = {}

    def of(self, witnessed: Witnessed) -> Count:
        """Return the count of a target. Two threads may come here at once: both get the one that is set first."""
        count = self.counts.get(witnessed)
        return self.counts.setdefault(witnessed, Count(witnessed=witnessed)) if count is None else count


class Ledger:
    """The counts of one trainer, or of the process, by phase, and what its present run had when it began."""

    def __init__(self, key: int = 0) -> None:
        self.by_phase = {phase: Doing(key, phase) for phase in Phase}
        self.run = Run({})
        self.has_evaluated = False

    def total(self, patch: str, target: str, *, observe: bool = False) -> Count:
        """Return the calls of a target since the trainer was made."""
        return _sum(
            count
            for _, each, count in self.every()
            if (each.patch, each.target, each.observe) == (patch, target, observe)
        )

    def every(self) -> Iterator[tuple[Phase, Witnessed, Count]]:
        for phase, doing in self.by_phase.items():
            for witnessed, count in list(doing.counts.items()):
                yield phase, witnessed, count

    def begin_run(self) -> None:
        """Note what has been counted before a run, and which patches stand."""
        self.run = Run({(phase, witnessed): count + Count() for phase, witnessed, count in self.every()})
        self.run.in_training = Here.thread.doing is self.by_phase[Phase.TRAIN]

    def in_run(self, phase: Phase, witnessed: Witnessed) -> Count:
        """Return the calls of a target in a phase since the run began."""
        count = self.by_phase[phase].counts.get(witnessed) or Count()
        return count - self.run.before.get((phase, witnessed), Count())

    @property
    def step_phases(self) -> tuple[Phase, ...]:
        """The phases in which this run takes its steps.

        A trainer that overrides ``training_step``, or ``train`` too, is seen in the outer ones alone.
        """
        if self.run.in_steps:
            return (Phase.STEP,)
        return self.loop_phases

    @property
    def loop_phases(self) -> tuple[Phase, ...]:
        """The phases of the whole training, with what is between its steps."""
        return (Phase.STEP, Phase.TRAIN) if self.run.in_training else (Phase.STEP, Phase.TRAIN, Phase.OTHER)


class Run:
    """A training of one trainer: its steps so far, and in which of them each target was called, acted and stood.

    ``before`` has what was counted before it. ``stood`` has the spans of steps, the first and the last, in which all of
    a step a target had its patch; the last is None while it has it.
    """

    def __init__(self, before: Mapping[tuple[Phase, Witnessed], Count]) -> None:
        self.before = before
        self.steps = 0
        self.called_in: dict[tuple[Witnessed, bool], int] = {}
        """In how many steps, by target: within the step itself (False), or in the loop around it too (True)."""
        self.acted_in: dict[tuple[Witnessed, bool], int] = {}
        self.stood: dict[Witnessed, list[list[int | None]]] = {each: [[1, None]] for each in standing()}
        self.in_steps = self.in_training = False
        self.effects: dict[str, Any] = {}
        """What each repair that acted changed in the first step, by patch, if somebody asked."""
        self.outer: Doing | None = None
        # All of them, unsorted: each trainer that is made comes here, those of self-tests too, and it is seldom asked.
        self._imported = list(sys.modules)
        self._changes = _changes
        self._last: dict[tuple[Witnessed, bool], Count] = {}

    def step_ends(self, ledger: Ledger) -> None:
        """Count the step that has just ended."""
        self.steps += 1
        sums: dict[tuple[Witnessed, bool], Count] = {}
        for loop, phases in ((False, ledger.step_phases), (True, ledger.loop_phases)):
            for phase in phases:
                for witnessed in list(ledger.by_phase[phase].counts):
                    key = witnessed, loop
                    sums[key] = sums.get(key, _NONE) + ledger.in_run(phase, witnessed)
        for key, count in sums.items():
            last = self._last.get(key, _NONE)
            self.called_in[key] = self.called_in.get(key, 0) + (count.called > last.called)
            self.acted_in[key] = self.acted_in.get(key, 0) + (count.acted > last.acted)
        self._last = sums
        self._note_what_stands(self.steps + 1, self.steps - 1)

    def step_begins(self) -> None:
        """Note what has gone on, or off, since the last step."""
        self._note_what_stands(self.steps + 1, self.steps)

    def _note_what_stands(self, first: int, last: int) -> None:
        """What is new is on from the step ``first``, and what is gone was on to the step ``last``."""
        if self._changes == _changes:
            return
        self._changes, now = _changes, standing()
        for witnessed in now:
            spans = self.stood.setdefault(witnessed, [])
            if not spans or spans[-1][1] is not None:
                # Nothing can have been called before its module was imported.
                is_late = spans or witnessed.target.partition(":")[0] in self._imported
                spans.append([first if is_late else 1, None])
        for witnessed, spans in self.stood.items():
            if witnessed not in now and spans[-1][1] is None:
                spans[-1][1] = last

    def spans(self, patch: str) -> list[tuple[int, int]]:
        """Return the spans of steps, the first and the last, in which all of a step a target of ``patch`` had it."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted(
            (first or 1, self.steps if last is None else last)
            for witnessed, spans in self.stood.items()
            if witnessed.patch == patch and not witnessed.observe
            for first, last in spans
        ):
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            elif first <= last:
                merged.append((first, last))
        return merged


PROCESS = Ledger()
"""What is called by no trainer."""


class _Thread(threading.local):
    doing = PROCESS.by_phase[Phase.OTHER]
    in_self_test = False


class Here:
    """What this thread does: ``Here.thread.doing``.

    It is an attribute of a class, and no global, since `dill` pickles a function of ours with its globals.
    """

    thread = _Thread()


class _Ledgers(ByIdentity[Ledger]):
    """The ledgers of all trainers that exist."""

    def of(self, trainer: Any) -> Ledger:
        """Return the ledger of ``trainer``, which may be new. Two threads get the same one."""
        key = id(trainer)
        entry = weakref.ref(trainer, lambda gone: self._forget(key, gone)), Ledger(key)
        reference, ledger = self._by_id.setdefault(key, entry)
        if reference() is not trainer:
            # Another object had the number, and its end has not been noticed yet.
            self._by_id[key], ledger = entry, entry[1]
        return ledger

    def all(self) -> list[Ledger]:
        return [ledger for reference, ledger in list(self._by_id.values()) if reference() is not None]


_ledgers = _Ledgers()


def ledger_of(trainer: Any) -> Ledger:
    """Return the ledger of ``trainer``, which is new if it has not called a target yet.

    Raises ``TypeError`` if the object cannot be referenced weakly.
    """
    ledger = _ledgers.get(trainer)
    return _ledgers.of(trainer) if ledger is None else ledger


def known(trainer: Any) -> Ledger | None:
    """Return the ledger of ``trainer``, or None if nothing of it has been counted."""
    return _ledgers.get(trainer) if trainer is not None else None


def elsewhere(instance: Any) -> Doing:
    """Return what counts the calls of a method of ``instance`` while this thread does the work of another, or none.

    It is what the thread does, if the instance cannot be referenced weakly.
    """
    try:
        return ledger_of(instance).by_phase[Phase.OTHER]
    except TypeError:
        return Here.thread.doing


def doing(trainer: Any, phase: Phase) -> Doing:
    """Return what ``Here.thread.doing`` must be while ``trainer`` is in ``phase``."""
    ledger = ledger_of(trainer)
    ledger.has_evaluated = ledger.has_evaluated or phase is Phase.EVALUATE
    run = ledger.run
    run.in_steps = run.in_steps or phase is Phase.STEP
    run.in_training = run.in_training or phase is Phase.TRAIN
    return ledger.by_phase[phase]


def event_begins(trainer: Any) -> None:
    """Take what follows for the training of ``trainer``, if its own ``train()`` has no layer that says so."""
    ledger = ledger_of(trainer)
    if Here.thread.doing.key != id(trainer):
        ledger.run.outer, Here.thread.doing = Here.thread.doing, ledger.by_phase[Phase.TRAIN]


def event_ends(trainer: Any) -> None:
    """End what ``event_begins`` has begun, if it has."""
    ledger = ledger_of(trainer)
    if ledger.run.outer is not None and Here.thread.doing is ledger.by_phase[Phase.TRAIN]:
        Here.thread.doing, ledger.run.outer = ledger.run.outer, None


def totals() -> dict[str, Count]:
    """Return, by patch, the calls of its targets by all trainers that exist and by functions, and the acts."""
    found: dict[str, Count] = {}
    for ledger in [PROCESS, *_ledgers.all()]:
        for _, each, count in ledger.every():
            found[each.patch] = found.get(each.patch, _NONE) + count
    return found


@contextmanager
def apart() -> Iterator[None]:
    """Leave the calls of functions in this block uncounted: a self-test makes them."""
    thread = Here.thread
    before = thread.doing, thread.in_self_test
    thread.doing, thread.in_self_test = Doing(0, Phase.OTHER), True
    try:
        yield
    finally:
        thread.doing, thread.in_self_test = before


@contextmanager
def uncounted(trainer: Any) -> Iterator[None]:
    """Leave what ``trainer`` calls in this block uncounted: it repeats what has been counted."""
    ledger, thread = ledger_of(trainer), Here.thread
    before = {(phase, each): count + Count() for phase, each, count in ledger.every()}
    in_self_test, thread.in_self_test = thread.in_self_test, True
    try:
        yield
    finally:
        thread.in_self_test = in_self_test
        for phase, each, count in ledger.every():
            was = before.get((phase, each), _NONE)
            count.called, count.acted, count.unseen = was.called, was.acted, was.unseen


# How a trainer was made. It stands in the trainer's own ``__dict__``, so that a copy has it as well, and it is made of
# what Python has itself, so that it can be unpickled where we are not.

CONSTRUCTION = "_trl_hotfix_construction"


def note_construction(trainer: Any) -> None:
    """Note in ``trainer`` which targets stood when it was made, and what its constructor has called of them."""
    counts = ledger_of(trainer).by_phase[Phase.CONSTRUCT].counts
    of_trainer = getattr(trainer, "__dict__", None)
    if isinstance(of_trainer, dict):
        of_trainer[CONSTRUCTION] = {
            each.key: (count.called, count.acted)
            for each in sorted({*standing(), *counts}, key=lambda each: each.key)
            for count in [counts.get(each, _NONE)]
        }


def construction(trainer: Any) -> Mapping[tuple[str, str, int, Options, bool], tuple[int, int]] | None:
    """Return what stood when ``trainer``, or what it is a copy of, was made, with the calls. None: nobody saw it."""
    found = getattr(trainer, "__dict__", {}).get(CONSTRUCTION)
    return found if isinstance(found, dict) else None


def _sum(counts: Any) -> Count:
    called = acted = 0
    for count in counts:
        called, acted = called + count.called, acted + count.acted
    return Count(called, acted)


class Counts:
    """The calls of one target with one patch, in whatever revision and with whatever options."""

    def __init__(self, patch: str, target: str) -> None:
        self._patch, self._target = patch, target

    def known(self, instance: Any) -> Count | None:
        """Return the calls by ``instance``, or None if it has never called this target."""
        ledger = known(instance)
        count = ledger.total(self._patch, self._target) if ledger is not None else Count()
        return count if count.called else None


def counts_of(patch: str, target: str) -> Counts:
    """Return the calls of the target ``module:attribute`` with this patch."""
    return Counts(patch, target)
