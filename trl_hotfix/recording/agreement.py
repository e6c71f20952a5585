"""All ranks of a run hear the same, and end together or not at all.

Each rank says what is wrong there. Rank 0 puts it together, and all ranks read that. A rank that waits in vain makes a
proposal of its own: the first proposal decides for all, since the store takes one only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from msgspec import Struct

from ..errors import plain, printable
from ..model import Strict
from ..selection import freeze_files
from . import ranks


class Problem(Struct, frozen=True):
    """What is wrong with the repairs of a run, in one line.

    ``patch`` is the id of the patch, if it is about one. ``ends`` is the level of strictness from which on it ends the
    run, None if none does. ``ranks`` are those that have it; empty: all, or the only one. ``is_hit``: the run hits the
    bug.
    """

    text: str
    patch: str = ""
    ends: Strict | None = Strict.RUN
    ranks: tuple[int, ...] = ()
    is_hit: bool = False

    def line(self) -> str:
        return f"rank {', '.join(map(str, self.ranks))}: {self.text}" if self.ranks else self.text


class Says(Struct, frozen=True):
    """What one rank says. ``may_hit`` has the bugs that its run hits or may hit, ``record`` its repairs, if asked."""

    level: Strict
    problems: tuple[Problem, ...] = ()
    may_hit: tuple[str, ...] = ()
    record: Any = None


class Agreed(Struct, frozen=True):
    """What all ranks have heard: the strictest level among them, and all problems."""

    level: Strict
    problems: tuple[Problem, ...] = ()

    @property
    def ending(self) -> list[Problem]:
        """The problems that end the run at this level."""
        return [problem for problem in self.problems if problem.ends is not None and problem.ends <= self.level]

    def lines(self) -> list[str]:
        return [problem.line() for problem in self.problems]

    def of_rank(self, rank: int) -> list[Problem]:
        """Return the problems that this rank logs. Rank 0 logs them all."""
        return [problem for problem in self.problems if rank == 0 or not problem.ranks or rank in problem.ranks]


def agree(own: Says, moment: str) -> Agreed:
    """Return what all ranks agree on. Each calls it at the same moments; one that does not is one of the problems."""
    rank, world = ranks.rank_and_world()
    if world == 1:
        return Agreed(own.level, own.problems)
    found = ranks.gather(msgspec.to_builtins(own), moment)
    agreed = Agreed(
        own.level, (*own.problems, Problem(f"rank 0 did not answer within {ranks.patience()}: {ranks.NOTHING_THERE}"))
    )
    if rank == 0:
        agreed = _merged(own, {other: found.get(other) for other in range(1, world)})
    decided = ranks.decide(moment, msgspec.json.encode(agreed).decode(), waits=rank != 0)
    return _read(decided, Agreed) or agreed


def _merged(own: Says, answers: Mapping[int, Any]) -> Agreed:
    """Return what rank 0 proposes. Equal problems of several ranks are one."""
    says = {rank: _converted(answer) for rank, answer in answers.items()}
    heard = [own, *(one for one in says.values() if one is not None)]
    may_hit = {patch for one in heard for patch in one.may_hit}
    by_problem: dict[Problem, list[int]] = {problem: [0] for problem in own.problems}
    for rank, one in says.items():
        for problem in _of_other(own, one, may_hit, is_there=answers[rank] is not None):
            by_problem.setdefault(problem, []).append(rank)
    problems = [
        msgspec.structs.replace(problem, ranks=() if len(on) > len(says) else tuple(on))
        for problem, on in by_problem.items()
    ]
    return Agreed(max(one.level for one in heard), tuple(problems))


def _of_other(own: Says, other: Says | None, may_hit: set[str], *, is_there: bool) -> Iterable[Problem]:
    """Yield what is wrong on another rank, and what differs there from this one."""
    if other is None:
        silent = f"no answer within {ranks.patience()}: {ranks.NOTHING_THERE}"
        yield Problem("its record cannot be read" if is_there else silent)
        return
    for problem in other.problems:
        yield msgspec.structs.replace(problem, text=printable(problem.text), ranks=())
    if own.record is None:
        return
    record = freeze_files.record(other.record)
    if record is None:
        yield Problem("its record cannot be read")
        return
    named = {problem.patch for problem in other.problems} - {""}
    differing = {
        patch: text
        for patch, text in ranks.differing(own.record, record, "on rank 0", "there").items()
        if patch not in named
    }
    if differing:
        concerns = "" in differing or not may_hit.isdisjoint(differing)
        yield Problem("; ".join(differing.values()), ends=Strict.RUN if concerns else Strict.ALL)


def _converted(answer: Any) -> Says | None:
    try:
        return msgspec.convert(answer, Says)
    except msgspec.ValidationError:
        return None


def _read(text: str, kind: type[Agreed]) -> Agreed | None:
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None


# A wrapper may fail in any step of a run. The rank on which it does asks all to stop two steps later: no rank ends the
# step after this one without the others, so that all have heard of it by then, even one whose GPU lags behind. The
# first that asks decides for all.

STEPS_LATER = 2


def ask_to_stop(problems: Iterable[Problem], moment: str, after: int) -> None:
    """Ask all ranks to stop after the step ``after``."""
    ranks.post(moment, {"after": after, "problems": msgspec.to_builtins(list(problems))})


def stop_asked(moment: str, step: int) -> tuple[Problem, ...]:
    """Return why a rank has asked to stop after this step or an earlier one, or nothing."""
    posted = ranks.posted(moment)
    if not isinstance(posted, dict) or not isinstance(posted.get("after"), int) or posted["after"] > step:
        return ()
    try:
        return msgspec.convert(posted.get("problems"), tuple[Problem, ...])
    except msgspec.ValidationError:
        return (Problem(f"a rank asks to stop: {plain(str(posted))}"),)
