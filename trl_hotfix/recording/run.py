"""What the witness saw of a run: a word and the counts for each patch, as a record and as lines of the log.

=====================  =================================================================================
``repaired``           the wrapper acted in calls of this trainer, in the phase that the target is for
``called``             this trainer called it, and it had nothing to do
``on some ranks``      it repaired on some ranks, and others did not call it
``in evaluation only`` evaluations of this trainer called it, and no step of its training
``not seen``           its data may have been prepared elsewhere, or come from a cache
``standing by``        it is on this trainer's class, and has not been called yet
``selected``           it is on, or goes on at its import, for other trainers than this one
=====================  =================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Any, Protocol

from msgspec import Struct

from .. import witness
from ..errors import printable
from ..model import Called, Patch, State
from ..patching import engine, reach
from ..reporting.report import PatchStatus, Report
from ..selection.freeze_files import SCHEMA
from ..selection.set_digest import digest_of
from ..witness import Count, Phase, Witnessed

LONGEST_PROBLEM, MOST_PROBLEMS = 500, 30
"""A record is read back by its size, so the text of errors, and the ranks that differ, must not fill it."""


class Observed(Protocol):
    """What an observation says of one bug, for the record."""

    def to_dict(self) -> dict[str, Any]: ...


class Effect(Protocol):
    """What a repair changed in the first step."""

    def to_dict(self) -> dict[str, Any]: ...

    def line(self) -> str: ...


class Word(str, Enum):
    """What a patch was to a run."""

    REPAIRED = "repaired"
    CALLED = "called"
    ON_SOME_RANKS = "on some ranks"
    IN_EVALUATION_ONLY = "in evaluation only"
    NOT_SEEN = "not seen"
    STANDING_BY = "standing by"
    SELECTED = "selected"


class Steps(Struct, frozen=True):
    """In how many of the ``of`` steps of a run a patch was called, and acted, and in which it was on all the time.

    ``on`` has the first and the last step of each span. ``every``: each step should call it.
    """

    of: int
    called: int
    acted: int
    on: tuple[tuple[int, int], ...]
    every: bool = False

    @property
    def gaps(self) -> bool:
        """Whether the patch was off in a step."""
        return self.on != ((1, self.of),)

    def line(self) -> str:
        spans = ", ".join(str(first) if first == last else f"{first} to {last}" for first, last in self.on)
        return f"on in {self.number_on} of {self.of} steps ({spans or 'none'})"

    @property
    def number_on(self) -> int:
        return sum(last - first + 1 for first, last in self.on)

    def to_dict(self) -> dict[str, Any]:
        return {"of": self.of, "called": self.called, "acted": self.acted, "on": [list(span) for span in self.on]}


class Repair(Struct, frozen=True):
    """A patch in a run, with the calls of its targets by the trainer, and those in which its wrappers acted.

    ``revision`` and ``options`` are those that acted, or were called. ``evaluation`` has the calls by evaluations where
    these are no part of it. ``steps`` is None if none of its targets is called in steps, or no step has ended.
    ``by_process`` are the calls, and the acts, by what is no trainer: other threads, or code before and after runs.
    """

    status: PatchStatus
    word: Word
    called: int
    acted: int
    revision: int
    options: Mapping[str, str] = {}
    evaluation: tuple[int, int] = (0, 0)
    by_process: tuple[int, int] = (0, 0)
    steps: Steps | None = None
    mixed: bool = False
    """Whether it acted with several options in this run."""
    is_over: bool = False
    """Whether its calls so far settle that it had nothing to do, if it never acted."""
    effect: Effect | None = None
    """What it changed in the first step, if somebody asked and it acted there."""
    overridden: str = ""
    """The method of the trainer's own class, or of itself, that stands in for a target of steps."""

    @property
    def name(self) -> str:
        return f"{self.status.id} (r{self.revision})"

    def frozen(self) -> dict[str, Any]:
        """Return what a freeze file says of the patch: as it acted."""
        return {"id": self.status.id, "revision": self.revision, "options": dict(self.options)}

    def to_dict(self) -> dict[str, Any]:
        counts = {"called": self.called, "acted": self.acted}
        more: dict[str, Any] = {}
        for name, pair in (("evaluation", self.evaluation), ("process", self.by_process)):
            if pair[0]:
                more[name] = {"called": pair[0], "acted": pair[1]}
        if self.steps is not None:
            more["steps"] = self.steps.to_dict()
        if self.effect is not None:
            more["effect"] = self.effect.to_dict()
        return {**self.frozen(), "word": self.word.value, **counts, **more}

    def counts(self) -> str:
        """Return how often it acted, and in how many of the steps."""
        text = f"acted in {self.acted} of {self.called} calls"
        if self.steps is None or not self.steps.called:
            return text
        return f"{text}, in {self.steps.acted} of {self.steps.of} steps"

    def line(self) -> str:
        """Return what became of the patch in this run, in one line."""
        if self.word is Word.REPAIRED:
            return f"{self.name} {self.counts()}"
        if self.word is Word.CALLED:
            return f"{self.name} was called {times(self.called)}, with nothing to do"
        if self.word is Word.IN_EVALUATION_ONLY:
            return f"{self.name} was called in evaluations only, {times(self.evaluation[0])}"
        moments = dict.fromkeys(_NEVER[target.called] for target in self.status.patch.targets)
        return f"{self.name} was not called: {', '.join(moments)}"

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with it in this run, although it is on and was called."""
        if self.steps is not None and self.steps.gaps and (self.steps.on or self.acted):
            yield f"{self.status.id}: {self.steps.line()}"
        elif self.steps is not None and self.steps.every and 0 < self.steps.called < self.steps.of:
            yield f"{self.status.id}: {self.steps.called} of {self.steps.of} steps called it"
        if self.mixed:
            yield f"{self.status.id}: it acted with several options in this run"


_NEVER = {
    None: "the run did not need it",
    Called.CONSTRUCTION: "the run did not need it",
    Called.SOME_CONSTRUCTIONS: "the run's arguments do not need it",
    Called.PREPARATION: "no data were prepared in this process",
    Called.DATA: "no batch was made in this process",
    Called.STEP: "no step called it",
    Called.SOME_STEPS: "the run's arguments do not need it",
    Called.EVALUATION: "evaluation never ran",
    Called.GENERATION: "nothing was generated",
    Called.SAVE: "nothing was saved",
    Called.RESUME: "the run was not resumed",
    Called.IMPORT: "the run did not need it",
}

_NOT_IN_EVALUATION = (
    *(Called.CONSTRUCTION, Called.SOME_CONSTRUCTIONS, Called.DATA, Called.STEP, Called.SOME_STEPS),
    *(Called.SAVE, Called.RESUME),
)
"""The targets that repair a training. What an evaluation calls of them has repaired none."""

_IN_TRAINING = (Called.STEP, Called.SOME_STEPS, Called.DATA, Called.GENERATION)
"""Targets that the steps of a training call, or its loop between them."""

_MAY_RUN_ELSEWHERE = (Called.PREPARATION, Called.DATA)
"""Targets that other processes may call, or none if a cache has what they make."""

_IN_STEPS = (Called.STEP, Called.SOME_STEPS)


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


class _Tally:
    """The calls of one patch by one trainer: those that count for its run, and those in evaluations that do not."""

    def __init__(self) -> None:
        self.run, self.evaluation = Count(), Count()
        self.by_options: dict[tuple[int, witness.Options], Count] = {}
        self.moments: set[Called | None] = set()

    def add(
        self, key: tuple[int, witness.Options], moment: Called | None, count: Count, *, evaluation: bool = False
    ) -> None:
        if evaluation:
            self.evaluation += count
        else:
            self.run += count
            self.moments.add(moment)
            self.by_options[key] = self.by_options.get(key, Count()) + count


def _tallies(trainer: Any, patches: Mapping[str, Patch]) -> dict[str, _Tally]:
    """Return what this trainer has called of each patch: when it was made, and since its run began."""
    found: dict[str, _Tally] = {}
    moments = {(patch.id, target.name): target.called for patch in patches.values() for target in patch.targets}
    ledger, construction = witness.known(trainer), witness.construction(trainer)
    live = ledger.by_phase[Phase.CONSTRUCT].counts if ledger is not None else {}
    since = {each.key: count for each, count in list(live.items())}
    for key, (called, acted) in (construction or {}).items():
        patch_id, target, revision, options, observe = key
        if not observe and called:
            # What was made there may act later. A copy has what its original had.
            count = Count(called, acted) if key not in since else since[key] + Count()
            moment = moments.get((patch_id, target))
            found.setdefault(patch_id, _Tally()).add((revision, options), moment, count)
    for phase, each, _ in ledger.every() if ledger is not None else ():
        assert ledger is not None
        if each.observe or (phase is Phase.CONSTRUCT and construction is not None):
            continue
        moment = moments.get((each.patch, each.target))
        count = _counted(ledger, phase, each, moment)
        if count.called:
            evaluation = phase is Phase.EVALUATE and moment in _NOT_IN_EVALUATION
            tally = found.setdefault(each.patch, _Tally())
            tally.add((each.revision, each.options), moment, count, evaluation=evaluation)
    return found


def _counted(ledger: witness.Ledger, phase: Phase, each: Witnessed, moment: Called | None) -> Count:
    """Return the calls in a phase that count: those since the run began, if the target is of a step."""
    if moment in _IN_STEPS:
        phases = ledger.step_phases if _is_within_steps(each, moment) else ledger.loop_phases
        return ledger.in_run(phase, each) if phase in (*phases, Phase.EVALUATE) else Count()
    if moment is Called.EVALUATION and ledger.has_evaluated and phase is not Phase.EVALUATE:
        return Count()
    return ledger.by_phase[phase].counts[each] + Count()


def _is_within_steps(each: Witnessed, moment: Called | None) -> bool:
    """Return whether a step itself calls a target, and not the loop around it: what is logged, data, and callbacks."""
    attribute = each.target.partition(":")[2]
    of_trainer = attribute.partition(".")[0].endswith("Trainer") and not attribute.endswith(".log")
    return moment is Called.STEP or (moment is Called.SOME_STEPS and of_trainer)


def repairs(trainer: Any, report: Report) -> tuple[Repair, ...]:
    """Return each patch that is on or goes on at its import, and each reverted one that this trainer has called."""
    tallies = _tallies(trainer, {status.id: status.patch for status in report})
    concerned = reach.concerning(engine.ENGINE.module_patches(), trainer) | tallies.keys()
    on = {status.id for status in report.on()}
    found = []
    for status in report:
        tally = tallies.get(status.id) or _Tally()
        # What a trainer was made with stays in its run, also after `revert()`.
        if status.id in on or (status.state is State.REVERTED and tally.run.acted):
            found.append(_repair(trainer, status, tally, is_concerned=status.id in concerned))
    return tuple(found)


def _repair(trainer: Any, status: PatchStatus, tally: _Tally, *, is_concerned: bool) -> Repair:
    steps = _steps(trainer, status.patch) if is_concerned else None
    word = _word(trainer, status.patch, tally) if is_concerned else Word.SELECTED
    acted = {key: count for key, count in tally.by_options.items() if count.acted} or tally.by_options
    # The newest comes last.
    revision, options = list(acted)[-1] if acted else (status.patch.revision, tuple(sorted(status.options.items())))
    ledger = witness.known(trainer)
    by_process = [
        count
        for _, each, count in witness.PROCESS.every()
        if each.patch == status.id and not each.observe and is_concerned
    ]
    return Repair(
        status,
        word,
        tally.run.called,
        tally.run.acted,
        revision,
        dict(options),
        (tally.evaluation.called, tally.evaluation.acted),
        (sum(count.called for count in by_process), sum(count.acted for count in by_process)),
        steps,
        len(acted) > 1 and any(count.acted for count in acted.values()),
        _is_over(trainer, tally),
        ledger.run.effects.get(status.id) if ledger is not None else None,
        reach.stands_in(engine.ENGINE.module_patches(), status.patch, trainer) if steps is not None else "",
    )


def _is_over(trainer: Any, tally: _Tally) -> bool:
    """Return whether what was called so far has seen all that it was for."""
    ledger = witness.known(trainer)
    has_trained = ledger is not None and ledger.run.steps > 0
    early = reach.BEFORE_TRAINING if has_trained or not tally.run.unseen else ()
    return tally.moments <= {*early, *(_IN_STEPS if has_trained else ())}


def _word(trainer: Any, patch: Patch, tally: _Tally) -> Word:
    if tally.run.acted:
        return Word.REPAIRED
    if tally.run.called:
        elsewhere = any(target.called in _MAY_RUN_ELSEWHERE for target in patch.targets)
        return Word.NOT_SEEN if elsewhere and tally.run.unseen == tally.run.called else Word.CALLED
    if tally.evaluation.called:
        return Word.IN_EVALUATION_ONLY
    ledger = witness.known(trainer)
    has_trained = ledger is not None and ledger.run.steps > 0
    if has_trained and any(target.called in _MAY_RUN_ELSEWHERE for target in patch.targets):
        return Word.NOT_SEEN
    return Word.STANDING_BY


def _steps(trainer: Any, patch: Patch) -> Steps | None:
    """Return the steps of the run in which a patch of them was called, acted and was on, or None."""
    ledger = witness.known(trainer)
    if ledger is None or not ledger.run.steps or not any(target.called in _IN_TRAINING for target in patch.targets):
        return None
    run = ledger.run
    moments = {target.name: target.called for target in patch.targets}
    mine = [
        (each, loop)
        for each, loop in run.called_in
        if each.patch == patch.id and not each.observe and loop is not _is_within_steps(each, moments.get(each.target))
    ]
    called = max((run.called_in[key] for key in mine), default=0)
    acted = max((run.acted_in[key] for key in mine), default=0)
    every = reach.every_step_calls(engine.ENGINE.module_patches(), patch, trainer)
    return Steps(run.steps, called, acted, tuple(run.spans(patch.id)), every)


def called(trainer: Any, patch: Patch) -> dict[str, int]:
    """Return how often ``trainer`` has called each target that we observe."""
    ledger = witness.known(trainer)
    seen = {each.target for each in witness.every_target() if each.patch == patch.id and each.observe}
    return {
        target.name: ledger.total(patch.id, target.name, observe=True).called if ledger is not None else 0
        for target in patch.targets
        if target.name in seen
    }


def record(
    trainer: Any,
    report: Report,
    observed: Iterable[Observed] = (),
    hits: Iterable[Mapping[str, Any]] | None = None,
    problems: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the record of a run. As a file it can be given to ``TRL_HOTFIX_ONLY=@file``.

    ``patches`` are those that are on or go on at their import, each with its word and its counts. Apart from them are
    those that did not reach this trainer, those that were taken off before it ended, and those that were only observed.
    ``hits`` are the bugs that the run hits or may hit. It is None if nobody asked, and empty if the run hits no bug;
    ``problems`` are the warnings.
    """
    all_repairs = repairs(trainer, report)
    entries = [repair.to_dict() for repair in all_repairs if repair.status.state is not State.REVERTED]
    off = [repair.to_dict() for repair in all_repairs if repair.status.state is State.REVERTED]
    unreached = [
        {**status.frozen(), "reason": status.reason.value} for status in report if status.state is State.UNREACHED
    ]
    lists: dict[str, list[Any]] = {
        "unreached": unreached,
        "reverted": off,
        "observed": [one.to_dict() for one in observed],
        "hits": [dict(hit) for hit in hits or ()],
        "problems": [printable(problem, LONGEST_PROBLEM) for problem in list(problems)[:MOST_PROBLEMS]],
    }
    asked = {"hits"} if hits is not None else set()
    kept = {name: entries for name, entries in lists.items() if entries or name in asked}
    frozen = {**report.freeze(), "digest": digest_of(report.trl, entries)}
    return {"schema": SCHEMA, **frozen, "patches": entries, **kept}


def frozen(trainer: Any, report: Report) -> dict[str, Any]:
    """Return what a freeze file says of the run: the patches with the options that its trainer was made with."""
    entries = [repair.frozen() for repair in repairs(trainer, report) if repair.status.state is not State.REVERTED]
    return {**report.freeze(), "digest": digest_of(report.trl, entries), "patches": entries}


def summary(all_repairs: Iterable[Repair]) -> str:
    """Return the patches of this trainer by their words, and the number of those for other trainers, in one line."""
    by_word: dict[Word, list[str]] = {}
    for repair in all_repairs:
        by_word.setdefault(repair.word, []).append(repair.name)
    others = len(by_word.pop(Word.SELECTED, ()))
    parts = [f"{word.value}: {', '.join(by_word[word])}" for word in Word if word in by_word] or [
        "none for this trainer"
    ]
    if others:
        parts.append(f"{others} more for other trainers")
    return "; ".join(parts)
