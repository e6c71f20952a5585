"""Run inside one release: which patch, alone, repairs what a claim violates.

    python -m bench.relations.repairing_inside OUT TASK.json

A task has ``trainer``, ``claims``, pairs of a relation and a claim as it is printed, and perhaps ``patches``. OUT gets
a line of JSON for each: what differs without patches, and for each of these patches, or for each that acts in its runs,
what no longer differs when it alone is on.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.model import Patch
from trl_hotfix.patching import engine
from trl_hotfix.relations import cells, inside
from trl_hotfix.relations.cells import VIOLATED, Cell
from trl_hotfix.relations.changes import applied
from trl_hotfix.relations.claims import Claim
from trl_hotfix.relations.recipes import Make, Recipe
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.setting import Setting
from trl_hotfix.relations.trainers import RECIPES

from bench.inside.counting import keep_ledgers, total
from bench.relations.ledger import said


class CountingRuns(cells.Runs):
    """Runs that note which patches act in them. Those of several ranks are other processes, and note none."""

    def __init__(self, make: Make, folder: Path, patches: Sequence[Patch]) -> None:
        super().__init__(make, folder)
        self._targets = [(patch, target) for patch in patches for target in gates.targets_here(patch)]
        self._acted: dict[str, set[str]] = {}
        self.asked: set[str] = set()

    def of(self, setting: Setting) -> Any:
        self.asked.add(repr(setting))
        return super().of(setting)

    def _run(self, setting: Setting) -> Any:
        before = self._counts()
        answer = super()._run(setting)
        after = self._counts()
        self._acted[repr(setting)] = {patch for patch in after if after[patch] > before[patch]}
        return answer

    def _counts(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for patch, target in self._targets:
            counts[patch.id] += total(patch, target)[1]
        return counts

    def acted(self) -> list[str]:
        """Return the ids of the patches that acted in the runs that were asked for since the last call."""
        ids = set().union(*(self._acted[setting] for setting in self.asked))
        self.asked.clear()
        return sorted(ids)


class Repairing:
    """Asks one trainer a claim with some patches on. A run of a setting with the same patches is not run again."""

    def __init__(self, recipe: Recipe, folder: Path) -> None:
        patches = [patch for patch in loading.load() if patch.default and gates.targets_here(patch)]
        self._recipe, self._everything = recipe, tuple(patch.id for patch in patches)
        self._runs = functools.cache(
            lambda ids: CountingRuns(applied(recipe, recipe.make), folder / str(len(ids)) / "".join(ids[:1]), patches)
        )

    def answer(self, relation: str, claim: Claim, patches: Sequence[str] = ()) -> dict[str, Any]:
        """Return what differs without patches and with all, and what each repairs alone: of ``patches``, or that acts.

        Those on by default are all. They do not run where ``patches`` are named.
        """
        off = self._asked(relation, claim, ())
        on = None if patches else self._asked(relation, claim, self._everything)
        acted = patches or self._runs(self._everything).acted()
        repairs = {patch: _gone(off, self._asked(relation, claim, (patch,))) for patch in acted}
        return {
            "relation": relation,
            "setting": str(claim),
            "off": said(off.as_data()),
            "on": None if on is None else said(on.as_data()),
            "acted": list(acted),
            "repairs": {patch: gone for patch, gone in repairs.items() if gone},
        }

    def _asked(self, relation: str, claim: Claim, ids: tuple[str, ...]) -> Cell:
        with engine.ENGINE.patched(ids, False, {}, unknown_body="try") if ids else nullcontext():
            return cells.asked(self._recipe.name, relation, claim, self._runs(ids))


def _gone(off: Cell, on: Cell) -> list[str]:
    """Return what differs no longer. A run that now fails, or that its trainer refuses, repairs nothing."""
    if on.state not in (cells.HOLDS, VIOLATED):
        return []
    still = said(on.as_data())
    return [what for what in said(off.as_data()) if what not in still]


def main(out: str, task: str) -> None:
    inside.prepare()
    keep_ledgers()
    chosen = json.loads(Path(task).read_text(encoding="utf-8"))
    recipe = RECIPES[chosen["trainer"]]
    recipe.classes()
    wanted = {tuple(pair) for pair in chosen["claims"]}
    claims = [(name, claim) for name, each in RELATIONS.items() for claim in each.claims(recipe)]
    with tempfile.TemporaryDirectory() as folder, Path(out).open("w", encoding="utf-8") as lines:
        repairing = Repairing(recipe, Path(folder))
        for name, claim in claims:
            if (name, str(claim)) in wanted:
                lines.write(json.dumps(repairing.answer(name, claim, chosen["patches"])) + "\n")
                lines.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
