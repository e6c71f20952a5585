"""Check one script in a process of its own: ``python -m trl_hotfix.checking.inside OUT TASK.json``.

It writes a line of JSON to OUT for each finding, as soon as it has one.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path
from typing import Any

from . import environment, loading, owners
from .bugs import settled as settled_bugs
from .forks import Outcome, Runs
from .judging import Judge
from .questions import questions
from .stem import NoTrainerError, Stem
from .variant import ALL, Variant


class Writer:
    """Writes lines of JSON, each with its kind."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def __call__(self, kind: str, **values: Any) -> None:
        with self._out.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({"kind": kind, **values}) + "\n")


class Check:
    """Asks all questions of a script, just before it makes its trainer."""

    def __init__(self, write: Writer, *, dry_run: bool) -> None:
        self._write, self._dry_run = write, dry_run
        self._done = 0

    def ask(self, runs: Runs, cls: Any, place: str) -> None:
        write = self._write
        if owners.has_own_loop(cls):
            write("error", text=f"{cls.__name__} cannot be asked: its training loop is not that of transformers")
            return
        write("progress", on="the run as it is")
        plain, first = self._plain(runs)
        if first.error:
            write("error", text=_failure(first))
            return
        facts = first.facts
        names = {name: facts[name] for name in ("trainer", "of_trl")}
        for text in [*first.notes["taken"], *_taken(facts)]:
            write("taken", text=text)
        for name, why in first.notes.get("rewards", {}).values():
            write("noted", text=f"the reward {name} {why}: a stand-in gives a number by the text of a completion")
        settled = runs.of(plain)
        if settled.error:
            write("error", text=_failure(settled))
            return
        asked = list(questions(plain, facts, settled.notes))
        repaired = runs.of(plain.but(patches=(ALL,)))
        bugs = facts["bugs"] if repaired.error else settled_bugs(facts, repaired.notes)
        write("trainer", **names, place=place, bugs=bugs)
        if self._dry_run:
            for question in asked:
                write("would", relation=question.relation, setting=str(question.variant), refused=question.refused)
            return
        drawn = runs.of(plain.but(drawn=True))
        judge = Judge(runs, plain, facts)
        if not judge.is_settled(drawn):
            whose = judge.draws(plain.but(drawn=True))
            by = f" ({whose})" if whose else ""
            write("error", text=f"no relation can be asked: random numbers{by} decide what each step of the run learns")
            asked = []
        for question in asked:
            write("progress", on=question.relation)
            for answer in judge.answer(question):
                write("relation", **answer)
        write("runs", count=len(runs))

    def _plain(self, runs: Runs) -> tuple[Variant, Outcome]:
        """Return the run as it is, with stand-ins for the rewards that we cannot ask."""
        first = runs.of(Variant())
        problems = first.notes.get("rewards", {})
        return (Variant(stand_ins=tuple(sorted(problems))) if problems else Variant()), first


def _failure(outcome: Outcome) -> str:
    where = f" ({outcome.where})" if outcome.where else ""
    return f"the script fails in a small run on the CPU: {outcome.error}{where}"


def _taken(facts: dict[str, Any]) -> list[str]:
    shape = facts["shape"]
    group = f", {shape.group} completions of a prompt" if shape.group > 1 else ""
    return [
        f"a step of {shape.rows} rows as {shape.batch_size} x {shape.accumulation}{group}",
        f"{facts['rows']} rows" if facts["rows"] is not None else "a stream of rows",
        f"a model of {facts['parameters']:,} weights",
        "the optimizer of the script" if facts["optimizer"] else "SGD without clipping, learning rate 0.05",
    ]


def main(out: str, task: str) -> None:
    chosen = json.loads(Path(task).read_text(encoding="utf-8"))
    write = Writer(Path(out))
    folder = Path(chosen["folder"])
    environment.without_gpu()
    environment.without_pushing()
    loading.install(folder, chosen)
    check = Check(write, dry_run=chosen["dry_run"])
    stem = Stem(chosen["which"], folder, check.ask)
    stem.install()
    write("progress", on="the script")
    try:
        stem.run(Path(chosen["script"]), chosen["arguments"])
    except (NoTrainerError, loading.NotHereError, loading.CannotBeSmallError) as error:
        write("error", text=str(error))
    # It is the user's code, which may raise anything: the answer has it.
    except Exception as error:  # noqa: BLE001
        traceback.print_exception(error)
        frames = [each for each in traceback.extract_tb(error.__traceback__) if "trl_hotfix" not in each.filename]
        where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
        text = f"the script fails before it makes its trainer: {type(error).__name__}: {error}{where}"
        write("error", text=text, cut=any(each.startswith("the first ") for each in loading.TAKEN))


if __name__ == "__main__":
    main(*sys.argv[1:])
