"""Run inside one release: ask a trainer some claims, and note which functions of TRL their runs call.

    python -m bench.relations.inside OUT TASK.json

A task has ``trainer``, ``on`` and ``claims``, pairs of a relation and a claim as it is printed. OUT gets a line of JSON
for each: the cell, the calls, and the seconds of its runs that no claim before it had. A claim about an option that the
release lacks is ``ABSENT``.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from trl_hotfix.patching import engine
from trl_hotfix.relations import cells, inside
from trl_hotfix.relations.changes import applied
from trl_hotfix.relations.claims import Claim
from trl_hotfix.relations.recipes import Recipe
from trl_hotfix.relations.relations import RELATIONS, is_here
from trl_hotfix.relations.setting import CannotBeAskedError, Setting
from trl_hotfix.relations.trainers import RECIPES

from bench.proving import calls

ABSENT = "absent"


class NotingRuns(cells.Runs):
    """Runs that note what they call. Of a run on several ranks, which are other processes, it is whole modules."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.by_setting: dict[str, set[str]] = {}
        self.asked: list[str] = []

    def of(self, setting: Setting) -> Any:
        self.asked.append(repr(setting))
        return super().of(setting)

    def _run(self, setting: Setting) -> Any:
        called = self.by_setting[repr(setting)] = set()
        if setting.ranks > 1:
            # The ranks would be slower by half a minute.
            called |= {f"{call.partition(':')[0]}:" for call in self.all_calls(self.by_setting)}
            return super()._run(setting)
        with calls.recorded(called):
            return super()._run(setting)

    def all_calls(self, settings: Any) -> set[str]:
        return set().union(*(self.by_setting[setting] for setting in settings))


def main(out: str, task: str) -> None:
    inside.prepare()
    chosen = json.loads(Path(task).read_text(encoding="utf-8"))
    if chosen["on"]:
        engine.ENGINE.apply(None, None, None, None)
    recipe = RECIPES[chosen["trainer"]]
    wanted = {tuple(pair) for pair in chosen["claims"]}
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as lines:
        runs = NotingRuns(applied(recipe, recipe.make), Path(folder))
        all_claims = [(name, claim) for name, each in RELATIONS.items() for claim in each.claims(recipe)]
        for name, claim in all_claims:
            if (name, str(claim)) not in wanted:
                continue
            runs.asked, start = [], time.perf_counter()
            answer = {
                "cell": _cell(name, claim, recipe, runs).as_data(),
                "calls": sorted(runs.all_calls(runs.asked)),
                "seconds": round(time.perf_counter() - start, 2),
            }
            lines.write(json.dumps(answer) + "\n")
            lines.flush()


def _cell(relation: str, claim: Claim, recipe: Recipe, runs: NotingRuns) -> cells.Cell:
    try:
        if is_here(claim, recipe):
            return cells.asked(recipe.name, relation, claim, runs)
    except CannotBeAskedError as error:  # The release has no such trainer.
        return cells.Cell(recipe.name, relation, str(claim), cells.UNASKED, str(error))
    return cells.Cell(recipe.name, relation, str(claim), ABSENT)


if __name__ == "__main__":
    main(*sys.argv[1:])
