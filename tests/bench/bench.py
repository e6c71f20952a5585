"""The proof bench: every patch against every real TRL release.

    python tests/bench/bench.py build
    python tests/bench/bench.py run [--releases 0.11.4,1.16.0] [--patches dpo-...] [--proofs none|newest|all]
    python tests/bench/bench.py curves [--patches dpo-...]

What was found is kept in ``.bench/results``, so that an interrupted run goes on where it was, and is written to
``evidence/matrix.json`` unless ``--no-write`` is given.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from packaging.version import Version
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parent))

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import digests, gates
from trl_hotfix.model import Patch

import evidence
import layout
from layout import BENCH, CHECKOUT, HERE, Place

GOOD = ("proven", "absent")
SECONDS_A_CELL = 60.0
SECONDS_A_PROOF = 300.0
STEPS = 40
"""Of the runs for a picture of the losses."""

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
    """Runs tasks, two at a time, and remembers what they found."""

    def __init__(self, jobs: int, fresh: bool, console: Console, results: Path = BENCH / "results") -> None:
        self._jobs, self._fresh, self._console, self._results = jobs, fresh, console, results

    def cells(self, patches: Sequence[Patch], places: Sequence[Place]) -> list[Answer]:
        """A verdict for every patch in every place."""
        found, missing = self._remembered("cell", [(patch, place) for place in places for patch in patches])
        by_place: dict[Place, list[Patch]] = {}
        for patch, place in missing:
            by_place.setdefault(place, []).append(patch)
        tasks = [Task("cell", place, tuple(its)) for place, its in by_place.items()]
        return found + self._all(tasks, self._self_tests)

    def proofs(self, patches: Sequence[Patch], places: Sequence[Place], which: str) -> list[Answer]:
        """The proofs that the plan asks for: ``newest`` or ``all``."""
        wanted = [(patch, place) for patch in patches for place in to_prove(patch, places, which)]
        found, missing = self._remembered("proof", wanted)
        return found + self._all([Task("proof", place, (patch,)) for patch, place in missing], self._proof)

    def _remembered(
        self, kind: str, wanted: Iterable[tuple[Patch, Place]]
    ) -> tuple[list[Answer], list[tuple[Patch, Place]]]:
        found: list[Answer] = []
        missing: list[tuple[Patch, Place]] = []
        for patch, place in wanted:
            file = self._file(kind, patch, place)
            if file.is_file() and not self._fresh:
                found.append(json.loads(file.read_text()))
            else:
                missing.append((patch, place))
        return found, missing

    def _file(self, kind: str, patch: Patch, place: Place) -> Path:
        return self._results / sources_of(patch) / f"{kind}-{patch.id}-{place}.json"

    def _all(self, tasks: list[Task], run: Callable[[Task], list[Answer]]) -> list[Answer]:
        answers: list[Answer] = []
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self._console) as progress, ThreadPoolExecutor(self._jobs) as pool:
            bar = progress.add_task(tasks[0].kind + "s" if tasks else "nothing to run", total=len(tasks))
            futures = {pool.submit(run, task): task for task in tasks}
            try:
                for future in as_completed(futures):
                    for answer in future.result():
                        answers.append(answer)
                        if answer["verdict"] not in GOOD:
                            said = f"{answer['verdict']}: {answer['patch']} on {answer['release']}@{answer['stack']}"
                            self._console.print(f"{said}: {answer['why']}", markup=False, style="bold red")
                    progress.advance(bar)
            except KeyboardInterrupt:
                pool.shutdown(cancel_futures=True)
                raise
        return answers

    def _self_tests(self, task: Task) -> list[Answer]:
        ids = [patch.id for patch in task.patches]
        limit = 120 + SECONDS_A_CELL * len(ids)
        done = self.process(task.place, [str(HERE / "release.py"), "{out}", str(SECONDS_A_CELL), *ids], limit)
        if isinstance(done, str):
            done = {"versions": {}, "cells": [error(patch, done) for patch in task.patches]}
        answers = []
        for patch, cell in zip(task.patches, done["cells"], strict=True):
            cell.pop("trl", None)
            answers.append(self._keep("cell", patch, task.place, {**cell, "versions": done["versions"]}))
        return answers

    def _proof(self, task: Task) -> list[Answer]:
        (patch,) = task.patches
        gradients = gradients_of(patch, task.place)
        gradients.parent.mkdir(parents=True, exist_ok=True)
        command = [str(HERE / "prove.py"), "{out}", str(gradients), patch.id]
        done = self.process(task.place, command, SECONDS_A_PROOF, *proof_of(patch).get("OVERLAYS", ()))
        if isinstance(done, str):
            done = {**error(patch, done), "runs": {}}
        return [self._keep("proof", patch, task.place, {"patch": patch.id, "revision": patch.revision, **done})]

    def curve(self, patch: Patch) -> Answer | str:
        """The losses of longer runs where the patch was proved last, and of the first fixed release; or why not."""
        proofs = [each for each in evidence.load()["proofs"] if each["patch"] == patch.id]
        proven = [each for each in proofs if each["verdict"] == "proven"]
        last = max(proven, key=lambda each: Version(each["release"]))
        place = Place(last["release"], last["stack"])
        runs = {"unpatched": place, "patched": place}
        if patch.upstream.fixed_in and proof_of(patch).get("PARITY"):
            its = layout.places([patch.upstream.fixed_in])
            # On the same stack where there is one.
            runs["fixed"] = next((each for each in its if each.stack == place.stack), its[0])
        answer: Answer = {"patch": patch.id, "revision": patch.revision, "stack": place.stack, "runs": {}}
        for name, its_place in runs.items():
            which = "patched" if name == "patched" else "unpatched"
            command = [str(HERE / "curves.py"), "{out}", str(STEPS), which, patch.id]
            done = self.process(its_place, command, SECONDS_A_PROOF, *proof_of(patch).get("OVERLAYS", ()))
            if isinstance(done, str):
                return f"{name}, {its_place}: {done}"
            answer["runs"][name] = {"release": its_place.release, "losses": done["losses"]}
        seen = apart(*(answer["runs"][name]["losses"] for name in ("unpatched", "patched")))
        return answer if seen else "the losses with the patch and without it look the same"

    def process(self, place: Place, arguments: list[str], limit: float, *overlays: str) -> Answer | str:
        """What the process wrote to its ``{out}``, or why it wrote nothing."""
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder, "out.json")
            command = [str(place.python), *(str(out) if each == "{out}" else each for each in arguments)]
            try:
                done = subprocess.run(
                    command,
                    env=place.environment(*overlays),
                    cwd=folder,
                    capture_output=True,
                    text=True,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return f"no answer within {limit:g} s"
            log = BENCH / "logs" / f"{Path(arguments[0]).stem}-{place}.log"
            log.parent.mkdir(parents=True, exist_ok=True)
            log.write_text(f"{done.stdout}\n{done.stderr}")
            if not out.is_file():
                last = (done.stderr.strip().splitlines() or ["nothing on standard error"])[-1]
                return f"the process ended with exit code {done.returncode}: {last}"
            answer: Answer = json.loads(out.read_text())
            return answer

    def _keep(self, kind: str, patch: Patch, place: Place, found: Answer) -> Answer:
        answer = {"release": place.release, "stack": place.stack, **found}
        file = self._file(kind, patch, place)
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_text(json.dumps(answer))
        partial.replace(file)
        return answer


def error(patch: Patch, why: str) -> Answer:
    """The cell of a process that gave no answer."""
    empty = {"leaves": {}, "bodies": {}}
    return {"patch": patch.id, "revision": patch.revision, "verdict": "error", "why": why, **empty}


def sources_of(patch: Patch) -> str:
    """Names the code that a result depends on: all of trl_hotfix but the other patches, the entry, and the proof."""
    package, proofs = CHECKOUT / "trl_hotfix", CHECKOUT / "tests" / "proofs"
    own = f"{patch.id.replace('-', '_')}.py"
    files = [path for path in package.rglob("*.py") if not _cannot_change_a_result(path.relative_to(package))]
    files += [package / "patches" / own, *proofs.glob(own), *(proofs.parent / "tiny").glob("*.py")]
    files += [HERE / "release.py", HERE / "prove.py", HERE / "releases.yaml"]
    return _digest(repr(patch), tuple(sorted(files)))


def _cannot_change_a_result(path: Path) -> bool:
    """Patches are added one by one; the commands and the reports only show what was measured."""
    return path.parts[0] in ("patches", "commands", "reporting")


@functools.cache
def _digest(text: str, files: tuple[Path, ...]) -> str:
    digest = hashlib.sha256(text.encode())
    for file in files:
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def proof_of(patch: Patch) -> Mapping[str, Any]:
    """The settings of a patch's proof (``OVERLAYS``, ``PARITY``), and whether it trains what is ``unaffected``.

    Nothing of it is imported here.
    """
    import ast

    file = CHECKOUT / "tests" / "proofs" / f"{patch.id.replace('-', '_')}.py"
    if not file.is_file():
        raise click.ClickException(f"{patch.id} has no proof: expected {file.relative_to(CHECKOUT)}")
    found = {"unaffected": False}
    for statement in digests.parse(file.read_text()).body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "unaffected":
            found["unaffected"] = True
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
            if name in ("OVERLAYS", "PARITY"):
                found[name] = ast.literal_eval(statement.value)
    return found


def to_prove(patch: Patch, places: Sequence[Place], which: str) -> list[Place]:
    """Where to run a proof: the newest release; with ``all``, also the first and the last release of each distinct body
    in range and the neighbours outside the range."""
    order = layout.releases()
    chosen = {order[-1]}
    if which == "all":
        known = evidence.bodies_by_release(patch)
        inside = [release for release in order if gates.targets_for(patch, release)]
        for body in {known[release] for release in inside}:
            its = [release for release in inside if known[release] == body]
            chosen |= {its[0], its[-1]}
        for release, following in itertools.pairwise(order):
            if (release in inside) != (following in inside):
                chosen |= {release, following}
    return [place for place in places if place.release in chosen]


def gradients_of(patch: Patch, place: Place) -> Path:
    return BENCH / "gradients" / patch.id / f"{place}.pt"


def parity(patches: Sequence[Patch], proofs: Sequence[Answer]) -> list[Answer]:
    """Patched old release against first fixed release: the largest differences of the loss and of any gradient."""
    import torch

    found = []
    for patch in patches:
        if not proof_of(patch).get("PARITY"):
            continue
        its = [proof for proof in proofs if proof["patch"] == patch.id]
        fixed_on = {proof["stack"]: proof for proof in its if proof["release"] == patch.upstream.fixed_in}
        for proof in its:
            # On the same stack where there is one: transformers 5 names the weights of experts differently.
            fixed = fixed_on.get(proof["stack"], next(iter(fixed_on.values()), None))
            if fixed is None or proof["verdict"] != "proven":
                continue
            ours, theirs = (
                torch.load(gradients_of(patch, Place(each["release"], each["stack"])))[run]
                for each, run in ((proof, "green"), (fixed, "red"))
            )
            # The first fixed release may have more: a trainer that crashes in this one for another reason.
            if not ours or not ours.keys() <= theirs.keys():
                raise click.ClickException(
                    f"{patch.id}: {proof['release']} and {fixed['release']} name their gradients differently"
                )
            difference = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
            found.append(
                {
                    "patch": patch.id,
                    "release": proof["release"],
                    "stack": proof["stack"],
                    "fixed_release": fixed["release"],
                    "loss_difference": abs(proof["runs"]["green"]["loss"] - fixed["runs"]["red"]["loss"]),
                    "gradient_difference": difference,
                    "gradients": len(ours),
                }
            )
    return found


def apart(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    """Can two curves be told apart in one picture? None is a loss that is no number."""
    numbers = [each for each in (*one, *other) if each is not None]
    if len(one) != len(other) or len(one) < STEPS / 2 or not numbers:
        return False
    visible = 0.02 * (max(numbers) - min(numbers))
    return any(
        (each is None) != (its is None) or (each is not None and its is not None and abs(each - its) > visible)
        for each, its in zip(one, other, strict=True)
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
    every = loading.load()
    wanted = value.split(",") if value else [patch.id for patch in every]
    unknown = set(wanted) - {patch.id for patch in every}
    if unknown:
        raise click.BadParameter(
            f"unknown patch {', '.join(sorted(unknown))}; `python -m trl_hotfix --list` shows them"
        )
    return tuple(patch for patch in every if patch.id in wanted)


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
    bench = Bench(jobs, fresh, console)
    cells = bench.cells(patches, places)
    if write:
        evidence.write(cells, [], [])
    proved = bench.proofs(patches, places, proofs) if proofs != "none" else []
    compared = parity(patches, proved) if proofs == "all" else []
    if write:
        evidence.write(cells, proved, compared)
    off = [each for each in compared if max(each["loss_difference"], each["gradient_difference"]) > 1e-6]
    for each in compared:
        console.print(
            f"parity {each['patch']}: {each['release']} patched, {each['fixed_release']}: loss differs by "
            f"{each['loss_difference']:.3g}, {each['gradients']} gradients by {each['gradient_difference']:.3g} at most"
        )
    for kind, answers in (("cells", cells), ("proofs", proved)):
        counted = Counter(answer["verdict"] for answer in answers)
        console.print(f"{kind}: {', '.join(f'{count} {verdict}' for verdict, count in sorted(counted.items()))}")
    failures = [answer for answer in [*cells, *proved] if answer["verdict"] not in GOOD]
    sys.exit(1 if failures or off else 0)


@commands.command()
@click.option("--patches", callback=_patches, help="Ids, separated by commas; default: all.")
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
def curves(patches: tuple[Patch, ...], jobs: int) -> None:
    """Train longer without each patch and with it: evidence/curves.json has the losses where they differ to the eye."""
    layout.build(layout.places(None), click.echo)
    bench = Bench(jobs, False, Console())
    with ThreadPoolExecutor(jobs) as pool:
        for patch, found in zip(patches, pool.map(bench.curve, patches), strict=True):
            click.echo(f"{patch.id}: {found if isinstance(found, str) else 'drawn'}")
            evidence.write_curve(patch, None if isinstance(found, str) else found)


if __name__ == "__main__":
    commands()
