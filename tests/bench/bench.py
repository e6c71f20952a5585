"""The proof bench: every patch against every real TRL release.

    python tests/bench/bench.py build
    python tests/bench/bench.py run [--releases 0.11.4,1.16.0] [--patches dpo-...] [--proofs none|newest|all]
    python tests/bench/bench.py curves [--patches dpo-...]

Results are kept in ``.bench/results``, so that an interrupted run continues where it stopped, and are written to
``evidence/matrix.json`` unless ``--no-write`` is given.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from packaging.version import Version
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))

import keys
import running
from running import GOOD, in_parallel

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import digests, gates
from trl_hotfix.model import Patch

import evidence
import layout
from layout import BENCH, CHECKOUT, HERE, Place

SECONDS_A_CELL = 60.0
SECONDS_A_PROOF = 300.0
STEPS = 40
"""The length of the runs whose losses are drawn."""

MACHINERY = 1
"""Raise it where a change of the engine or of the bench changes what is seen: nothing else makes all results stale."""

SOURCES = keys.Sources(CHECKOUT, CHECKOUT / "tests", CHECKOUT / "tests" / "proofs")

Answer = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """One process to run: the self-tests of some patches, or one proof, in one place."""

    kind: str
    place: Place
    patches: tuple[Patch, ...]

    def __str__(self) -> str:
        return f"{self.kind} {self.place} {', '.join(patch.id for patch in self.patches)}"


class Bench:
    """Runs tasks, ``jobs`` at a time, and keeps their results in files."""

    def __init__(self, jobs: int, fresh: bool, console: Console, results: Path = BENCH / "results") -> None:
        self._jobs, self._fresh, self._console, self._results = jobs, fresh, console, results

    def cells(self, patches: Sequence[Patch], places: Sequence[Place]) -> list[Answer]:
        """Return a verdict for every patch in every place."""
        answers, missing = self._remembered("cell", [(patch, place) for place in places for patch in patches])
        by_place: dict[Place, list[Patch]] = {}
        for patch, place in missing:
            by_place.setdefault(place, []).append(patch)
        tasks = [Task("cell", place, tuple(place_patches)) for place, place_patches in by_place.items()]
        return answers + self._all(tasks, self._self_tests)

    def proofs(self, patches: Sequence[Patch], places: Sequence[Place], which: str) -> list[Answer]:
        """Return the results of the proofs that ``which`` selects: ``newest`` or ``all``."""
        planned = [(patch, place) for patch in patches for place in to_prove(patch, places, which)]
        answers, missing = self._remembered("proof", planned)
        return answers + self._all([Task("proof", place, (patch,)) for patch, place in missing], self._proof)

    def _remembered(
        self, kind: str, planned: Iterable[tuple[Patch, Place]]
    ) -> tuple[list[Answer], list[tuple[Patch, Place]]]:
        answers: list[Answer] = []
        missing: list[tuple[Patch, Place]] = []
        for patch, place in planned:
            file = self._file(kind, patch, place)
            if file.is_file() and not self._fresh:
                answers.append(json.loads(file.read_text()))
            else:
                missing.append((patch, place))
        return answers, missing

    def _file(self, kind: str, patch: Patch, place: Place) -> Path:
        return self._results / f"{kind}-{patch.id}-{place}-{key_of(kind, patch, place)}.json"

    def _all(self, tasks: list[Task], run: Callable[[Task], list[Answer]]) -> list[Answer]:
        return in_parallel(f"{tasks[0].kind}s" if tasks else "results", tasks, run, self._jobs, self._console)

    def _self_tests(self, task: Task) -> list[Answer]:
        ids = [patch.id for patch in task.patches]
        limit = 120 + SECONDS_A_CELL * len(ids)
        result = self.process(task.place, [str(HERE / "release.py"), "{out}", str(SECONDS_A_CELL), *ids], limit)
        if isinstance(result, str):
            result = {"versions": {}, "cells": [error(patch, result) for patch in task.patches]}
        answers = []
        for patch, cell in zip(task.patches, result["cells"], strict=True):
            cell.pop("trl", None)
            answers.append(self._keep("cell", patch, task.place, {**cell, "versions": result["versions"]}))
        return answers

    def _proof(self, task: Task) -> list[Answer]:
        (patch,) = task.patches
        gradients = gradients_of(patch, task.place)
        gradients.parent.mkdir(parents=True, exist_ok=True)
        command = [str(HERE / "prove.py"), "{out}", str(gradients), patch.id]
        result = self.process(task.place, command, SECONDS_A_PROOF, *proof_of(patch).get("OVERLAYS", ()))
        if isinstance(result, str):
            result = {**error(patch, result), "runs": {}}
        return [self._keep("proof", patch, task.place, {"patch": patch.id, "revision": patch.revision, **result})]

    def curve(self, patch: Patch) -> Answer | str:
        """Return the losses of longer runs on the last proven and the first fixed release, or why there are none."""
        proofs = [proof for proof in evidence.load()["proofs"] if proof["patch"] == patch.id]
        proven = [proof for proof in proofs if proof["verdict"] == "proven"]
        last = max(proven, key=lambda proof: Version(proof["release"]))
        place = Place(last["release"], last["stack"])
        runs = {"unpatched": place, "patched": place}
        if patch.upstream.fixed_in and proof_of(patch).get("PARITY"):
            fixed_places = layout.places([patch.upstream.fixed_in])
            # On the same stack if the fixed release runs on it.
            runs["fixed"] = next((fixed for fixed in fixed_places if fixed.stack == place.stack), fixed_places[0])
        answer: Answer = {"patch": patch.id, "revision": patch.revision, "stack": place.stack, "runs": {}}
        for name, run_place in runs.items():
            which = "patched" if name == "patched" else "unpatched"
            command = [str(HERE / "curves.py"), "{out}", str(STEPS), which, patch.id]
            result = self.process(run_place, command, SECONDS_A_PROOF, *proof_of(patch).get("OVERLAYS", ()))
            if isinstance(result, str):
                return f"{name}, {run_place}: {result}"
            answer["runs"][name] = {"release": run_place.release, "losses": result["losses"]}
        visible = apart(*(answer["runs"][name]["losses"] for name in ("unpatched", "patched")))
        return answer if visible else "the losses with the patch and without it look the same"

    def process(self, place: Place, arguments: list[str], limit: float, *overlays: str) -> Answer | str:
        """Return what the process wrote to its ``{out}``, or the reason why it wrote nothing."""
        return running.process(place, arguments, limit, *overlays)

    def _keep(self, kind: str, patch: Patch, place: Place, result: Answer) -> Answer:
        answer = {"release": place.release, "stack": place.stack, **result}
        file = self._file(kind, patch, place)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(answer))
        partial.replace(file)
        return answer


def error(patch: Patch, reason: str) -> Answer:
    """Return the cell of a process that gave no answer."""
    empty = {"leaves": {}, "bodies": {}}
    return {"patch": patch.id, "revision": patch.revision, "verdict": "error", "why": reason, **empty}


def key_of(kind: str, patch: Patch, place: Place) -> str:
    """Return the key of what a cell or a proof depends on in this place: our code, the entry without prose, the stack.

    TRL's code is that of the release, which does not change.
    """
    module, proof = modules.module_of(patch.id), patch.id.replace("-", "_")
    pieces = [(module, name) for name in (patch.self_test, *(target.wrapper for target in patch.targets))]
    if kind == "proof":
        defined = SOURCES.module(proof)
        names = ("train", "unaffected", "DATA", "OVERLAYS", "PARITY")
        pieces += [(proof, name) for name in names if defined is not None and name in defined.definitions]
    policy = keys.policy_of(patch, place.targets_of(patch))
    special = layout.settings()["special"].get(place.release, {})
    return keys.digest_of([MACHINERY, SOURCES.closure(pieces), policy, layout.stack_key(place.stack), special])


def proof_of(patch: Patch) -> Mapping[str, Any]:
    """Return the settings of a patch's proof (``OVERLAYS``, ``PARITY``), and whether it has a run ``unaffected``.

    The file is parsed and not imported.
    """
    import ast

    file = CHECKOUT / "tests" / "proofs" / f"{patch.id.replace('-', '_')}.py"
    if not file.is_file():
        raise click.ClickException(f"{patch.id} has no proof: expected {file.relative_to(CHECKOUT)}")
    settings = {"unaffected": False}
    for statement in digests.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "unaffected":
            settings["unaffected"] = True
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("OVERLAYS", "PARITY"):
                settings[name] = ast.literal_eval(statement.value)
    return settings


def to_prove(patch: Patch, places: Sequence[Place], which: str) -> list[Place]:
    """Return where to run a proof: on the newest release.

    With ``all``, also on the first and the last release of each distinct body in range and the neighbours outside the
    range.
    """
    order = layout.releases()
    chosen = {order[-1]}
    if which == "all":
        known = evidence.bodies_by_release(patch)
        inside = [release for release in order if gates.targets_for(patch, release)]
        for body in {known[release] for release in inside}:
            releases = [release for release in inside if known[release] == body]
            chosen |= {releases[0], releases[-1]}
        for release, following in itertools.pairwise(order):
            if (release in inside) != (following in inside):
                chosen |= {release, following}
    return [place for place in places if place.release in chosen]


def gradients_of(patch: Patch, place: Place) -> Path:
    return BENCH / "gradients" / patch.id / f"{place}.pt"


def parity(patches: Sequence[Patch], proofs: Sequence[Answer]) -> list[Answer]:
    """Return the largest differences of loss and gradients between patched old releases and the first fixed one."""
    import torch

    comparisons = []
    for patch in patches:
        if not proof_of(patch).get("PARITY"):
            continue
        proofs_of_patch = [proof for proof in proofs if proof["patch"] == patch.id]
        fixed_on = {proof["stack"]: proof for proof in proofs_of_patch if proof["release"] == patch.upstream.fixed_in}
        for proof in proofs_of_patch:
            # On the same stack if possible: transformers 5 names the weights of experts differently.
            fixed = fixed_on.get(proof["stack"], next(iter(fixed_on.values()), None))
            if fixed is None or proof["verdict"] != "proven":
                continue
            gradients, fixed_gradients = (
                torch.load(gradients_of(patch, Place(answer["release"], answer["stack"])))[run]
                for answer, run in ((proof, "green"), (fixed, "red"))
            )
            # The first fixed release may have more: of a trainer that crashes in the old release for another reason.
            if not gradients or not gradients.keys() <= fixed_gradients.keys():
                raise click.ClickException(
                    f"{patch.id}: {proof['release']} and {fixed['release']} name their gradients differently"
                )
            difference = max(float((gradients[name] - fixed_gradients[name]).abs().max()) for name in gradients)
            comparisons.append(
                {
                    "patch": patch.id,
                    "release": proof["release"],
                    "stack": proof["stack"],
                    "fixed_release": fixed["release"],
                    "loss_difference": abs(proof["runs"]["green"]["loss"] - fixed["runs"]["red"]["loss"]),
                    "gradient_difference": difference,
                    "gradients": len(gradients),
                }
            )
    return comparisons


def apart(losses: Sequence[float | None], other_losses: Sequence[float | None]) -> bool:
    """Return whether two curves can be distinguished in one picture. A loss of None is not a number."""
    numbers = [loss for loss in (*losses, *other_losses) if loss is not None]
    if len(losses) != len(other_losses) or len(losses) < STEPS / 2 or not numbers:
        return False
    visible = 0.02 * (max(numbers) - min(numbers))
    return any(
        (loss is None) != (other_loss is None)
        or (loss is not None and other_loss is not None and abs(loss - other_loss) > visible)
        for loss, other_loss in zip(losses, other_losses, strict=True)
    )


@click.group()
def commands() -> None:
    """The proof bench."""


def _places(context: Any, option: Any, value: str | None) -> tuple[Place, ...]:
    try:
        return layout.places(value.split(",") if value else None)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _patches(context: Any, option: Any, value: str | None) -> tuple[Patch, ...]:
    catalogue = loading.load()
    chosen = value.split(",") if value else [patch.id for patch in catalogue]
    unknown = set(chosen) - {patch.id for patch in catalogue}
    if unknown:
        raise click.BadParameter(
            f"unknown patch {', '.join(sorted(unknown))}; `python -m trl_hotfix --list` shows them"
        )
    return tuple(patch for patch in catalogue if patch.id in chosen)


releases_option = click.option("--releases", "places", callback=_places, help="Separated by commas; default: all.")


@commands.command()
@releases_option
def build(places: tuple[Place, ...]) -> None:
    """Lay out the releases. What is there already stays."""
    layout.build(places, click.echo)


@commands.command()
@releases_option
@click.option("--patches", callback=_patches, help="Ids, separated by commas; default: all.")
@click.option("--proofs", type=click.Choice(["none", "newest", "all"]), default="all", show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
@click.option("--fresh", is_flag=True, help="Run again what is remembered.")
@click.option("--write/--no-write", default=True, help="Write evidence/matrix.json and the picture.")
def run(
    places: tuple[Place, ...], patches: tuple[Patch, ...], proofs: str, jobs: int, fresh: bool, write: bool
) -> None:
    """Run self-tests and proofs, and count the verdicts. Exit code 1 if one of them is a failure."""
    console = Console()
    layout.build(places, click.echo)
    if write or proofs == "all":
        # The evidence and the plan of the proofs need the code of every release, also of those that are not run.
        layout.build_release_overlays(places[0].python, click.echo)
    bench = Bench(jobs, fresh, console)
    cells = bench.cells(patches, places)
    if write:
        evidence.write(cells, [], [])
    proved = bench.proofs(patches, places, proofs) if proofs != "none" else []
    compared = parity(patches, proved) if proofs == "all" else []
    if write:
        evidence.write(cells, proved, compared)
    off = [row for row in compared if max(row["loss_difference"], row["gradient_difference"]) > 1e-6]
    for row in compared:
        console.print(
            f"parity {row['patch']}: {row['release']} patched, {row['fixed_release']}: loss differs by "
            f"{row['loss_difference']:.3g}, {row['gradients']} gradients by {row['gradient_difference']:.3g} at most"
        )
    for kind, answers in (("cells", cells), ("proofs", proved)):
        counted = Counter(answer["verdict"] for answer in answers)
        console.print(f"{kind}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counted.items()))}")
    failures = [answer for answer in [*cells, *proved] if answer["verdict"] not in GOOD]
    sys.exit(1 if failures or off else 0)


@commands.command()
@click.option("--release", "places", callback=_places, required=True, help="The release to verify on.")
@click.argument("patches", metavar="ID[,ID...]", callback=_patches)
def verify(places: tuple[Place, ...], patches: tuple[Patch, ...]) -> None:
    """Run the self-tests of patches on one release and print their numbers: the loop while a patch is written."""
    layout.build(places, click.echo)
    with tempfile.TemporaryDirectory() as folder:
        cells = Bench(1, True, Console(quiet=True), Path(folder)).cells(patches, places)
    for cell in cells:
        reason = f": {cell['why']}" if cell["why"] else ""
        click.echo(f"{cell['patch']} on {cell['release']}@{cell['stack']}: {cell['verdict']}{reason}")
        for module, runs in cell["leaves"].items():
            for name, outcome in runs.items():
                numbers = " ".join(f"{key}={value}" for key, value in outcome.items() if key != "verdict")
                click.echo(f"  {module} {name}: {outcome['verdict']} {numbers}".rstrip())
    sys.exit(0 if all(cell["verdict"] in GOOD for cell in cells) else 1)


@commands.command()
@click.option("--patches", callback=_patches, help="Ids, separated by commas; default: all.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
def curves(patches: tuple[Patch, ...], jobs: int) -> None:
    """Train longer without each patch and with it: evidence/curves.json has the losses where they differ to the eye."""
    layout.build(layout.places(None), click.echo)
    bench = Bench(jobs, False, Console())
    with ThreadPoolExecutor(jobs) as pool:
        for patch, curve in zip(patches, pool.map(bench.curve, patches), strict=True):
            click.echo(f"{patch.id}: {curve if isinstance(curve, str) else 'drawn'}")
            evidence.write_curve(patch, None if isinstance(curve, str) else curve)


if __name__ == "__main__":
    commands()
