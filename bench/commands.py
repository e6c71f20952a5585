"""The proof bench: every patch against every real TRL release.

    python -m bench build
    python -m bench run [--releases 0.11.4,1.16.0] [--patches dpo-...] [--proofs none|all] [--again]
    python -m bench run --again --shard 3/20     # a part of everything; `merge` puts parts together
    python -m bench verify --release 0.11.4 dpo-...
    python -m bench check dpo-...                # everything about one patch, in eleven lines
    python -m bench curves [--patches dpo-...]

`run` runs what is not on record in ``evidence/`` with the present key, and records it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch

from bench.mutants import counting as mutants
from bench.options import chosen_places, jobs_option, releases_option, shard_option
from bench.proving import cells, longer_runs, proofs
from bench.proving import check as checking
from bench.proving.running import GOOD, Answer, Case
from bench.releases import layout
from bench.releases.layout import Place
from bench.results import evidence
from bench.shards import Shard


def chosen_cells(patches: Sequence[Patch], places: Sequence[Place], again: bool, shard: Shard) -> list[Case]:
    """Return the cells to run. A shard has all cells of its places: to import TRL takes as long as many self-tests."""
    places = [place for place in places if shard.has(str(place))]
    return [Case(patch, place) for patch in patches for place in places] if again else cells.missing(patches, places)


def chosen_proofs(patches: Sequence[Patch], places: Sequence[Place], again: bool, shard: Shard) -> list[Case]:
    """Return the proofs to run. A shard has all proofs of its patches, since parity compares them."""
    patches = [patch for patch in patches if shard.has(patch.id)]
    if again:
        return proofs.planned(patches, places)
    return proofs.with_fixed_release(proofs.missing(patches, places))


def differences(answers: Sequence[Answer], kind: str) -> list[str]:
    """Return where answers are not what is on record with the same key."""
    on_record = {
        (entry["patch"], evidence.place_of(entry)): entry
        for patch_id in {answer["patch"] for answer in answers}
        for entry in evidence.load(patch_id)[kind]
    }
    lines = []
    for answer in answers:
        place = evidence.place_of(answer)
        recorded = on_record.get((answer["patch"], place))
        if recorded is None or recorded["key"] != answer["key"]:
            continue
        for name in ("verdict", "bodies"):
            if recorded.get(name) != answer.get(name):
                lines.append(f"{answer['patch']} on {place}: on record is {recorded[name]}, seen is {answer[name]}")
    return lines


def counted(answers: Sequence[Answer]) -> str:
    verdicts = Counter(answer["verdict"] for answer in answers)
    runs = {(answer["patch"], answer["stack"], answer["ran"]) for answer in answers}
    counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
    return f"{len(answers)} by {len(runs)} runs: {counts}" if answers else "nothing to run"


@click.group()
def commands() -> None:
    """The proof bench."""


def _patches(context: Any, option: Any, value: str | None) -> tuple[Patch, ...]:
    catalogue = loading.load()
    chosen = value.split(",") if value else [patch.id for patch in catalogue]
    unknown = set(chosen) - {patch.id for patch in catalogue}
    if unknown:
        raise click.BadParameter(
            f"unknown patch {', '.join(sorted(unknown))}; `python -m trl_hotfix --list` shows them"
        )
    return tuple(patch for patch in catalogue if patch.id in chosen)


@commands.command()
@releases_option
def build(places: tuple[Place, ...]) -> None:
    """Lay out the releases. What is there already stays."""
    layout.build(places, click.echo)


@commands.command()
@releases_option
@click.option("--patches", callback=_patches, help="Ids, separated by commas; default: all.")
@click.option("--proofs", "which", type=click.Choice(["none", "all"]), default="all", show_default=True)
@click.option("--again", is_flag=True, help="Run also what is on record, without sharing runs, and compare.")
@shard_option
@jobs_option
@click.option("--write/--no-write", default=True, help="Write the results.")
@click.option("--into", type=click.Path(file_okay=False, path_type=Path), default=None, help="Default: evidence/.")
def run(
    places: tuple[Place, ...],
    patches: tuple[Patch, ...],
    which: str,
    again: bool,
    shard: Shard,
    jobs: int,
    write: bool,
    into: Path | None,
) -> None:
    """Run self-tests and proofs, and count the verdicts. Exit code 1 if one of them is a failure."""
    console = Console()
    # Proofs are planned, runs are shared and evidence is written by the code of every release.
    layout.build_release_overlays(Path(sys.executable), click.echo)
    cases = chosen_cells(patches, places, again, shard)
    proof_cases = chosen_proofs(patches, places, again, shard) if which == "all" else []
    if cases or proof_cases:
        layout.build({case.place for case in [*cases, *proof_cases]}, click.echo)
    folder = into or evidence.EVIDENCE
    cell_answers = cells.run(cases, jobs, console, share=not again, fresh=again)
    failures = differences(cell_answers, "cells")
    between = cells.missing_beneath(patches, places)
    if between:
        layout.build({case.place for case in between}, click.echo)
    beneath = cells.run(between, jobs, console, share=False)
    if write:
        _write(patches, cell_answers, [], [], folder, beneath)
    proof_answers = proofs.run(proof_cases, jobs, console, share=not again, fresh=again)
    failures += differences(proof_answers, "proofs")
    compared = proofs.parity(patches, proof_answers)
    if write:
        _write(patches, [], proof_answers, compared, folder)
    for row in compared:
        line = (
            f"parity {row['patch']}: {row['release']} patched, {row['fixed_release']}: loss differs by "
            f"{row['loss_difference']:.3g}, {row['gradients']} gradients by {row['gradient_difference']:.3g} at most"
        )
        console.print(line)
        if max(row["loss_difference"], row["gradient_difference"]) > 1e-6:
            failures.append(line)
    for kind, answers in (("cells", cell_answers), ("proofs", proof_answers)):
        console.print(f"{kind}: {counted(answers)}")
    if which == "all" and write and into is None and set(places) == set(layout.places()):
        failures += mutants.counted(mutants.stale(patches), jobs, console, write=True)
    failures += [
        f"{answer['patch']} on {evidence.place_of(answer)}: {answer['verdict']}: {answer['why']}"
        for answer in [*cell_answers, *beneath, *proof_answers]
        # A cell beneath stands for a body that has the bug.
        if answer["verdict"] not in (("proven",) if answer in beneath else GOOD)
    ]
    for line in failures:
        console.print(line, markup=False, style="bold red")
    sys.exit(1 if failures else 0)


def _write(
    patches: Sequence[Patch],
    cell_answers: Sequence[Answer],
    proof_answers: Sequence[Answer],
    compared: Sequence[Answer],
    folder: Path,
    beneath: Sequence[Answer] = (),
) -> None:
    contradictions = []
    for patch in patches:
        new_cells, new_proofs, new_parity, new_beneath = (
            [answer for answer in answers if answer["patch"] == patch.id]
            for answers in (cell_answers, proof_answers, compared, beneath)
        )
        if new_cells or new_proofs or new_beneath:
            try:
                evidence.write(patch, new_cells, new_proofs, new_parity, folder, new_beneath)
            except ValueError as error:
                # What was seen of the other patches took long, and is kept.
                contradictions.append(str(error))
    if contradictions:
        raise click.ClickException("\n".join(contradictions))


@commands.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
def merge(folders: tuple[Path, ...]) -> None:
    """Record the parts that several machines have written with `run --shard K/N --into FOLDER`."""
    layout.build_release_overlays(Path(sys.executable), click.echo)
    for patch in loading.load():
        for folder in folders:
            part = evidence.load(patch.id, folder)
            if part["cells"] or part["proofs"]:
                evidence.write(patch, part["cells"], part["proofs"], part["parity"])


def _first_places(patch: Patch, places: Sequence[Place], every_stack: bool) -> list[Place]:
    if every_stack:
        return list(places)
    by_release = {place.release: [other for other in places if other.release == place.release] for place in places}
    # The main stack is the first. A patch may require another version of a library.
    return [next((place for place in group if place.targets_of(patch)), group[0]) for group in by_release.values()]


@commands.command()
@click.option("--release", "places", callback=chosen_places, required=True, help="The release to verify on.")
@click.option("--every-stack", is_flag=True, help="Not only the main stack, or the first one on which the bug is.")
@click.argument("patches", metavar="ID[,ID...]", callback=_patches)
def verify(places: tuple[Place, ...], every_stack: bool, patches: tuple[Patch, ...]) -> None:
    """Run the self-tests of patches on one release and print their numbers: the loop while a patch is written."""
    cases = [Case(patch, place) for patch in patches for place in _first_places(patch, places, every_stack)]
    layout.build({case.place for case in cases}, click.echo)
    answers = cells.run(cases, 1, Console(quiet=True), share=False, fresh=True)
    for cell in answers:
        reason = f": {cell['why']}" if cell["why"] else ""
        click.echo(f"{cell['patch']} on {cell['release']}@{cell['stack']}: {cell['verdict']}{reason}")
        for module, runs in cell["leaves"].items():
            for name, outcome in runs.items():
                numbers = " ".join(f"{key}={value}" for key, value in outcome.items() if key != "verdict")
                click.echo(f"  {module} {name}: {outcome['verdict']} {numbers}".rstrip())
    sys.exit(0 if all(cell["verdict"] in GOOD for cell in answers) else 1)


@commands.command()
@click.argument("patches", metavar="ID", callback=_patches)
@jobs_option
def check(patches: tuple[Patch, ...], jobs: int) -> None:
    """Do everything about one patch: what is not on record, and its matrix tests. Exit code 1 on failure."""
    failed = False
    for patch in patches:
        summary, failures = checking.check(patch, jobs, Console())
        for line in [*summary, *(f"FAILED      {failure}" for failure in failures)]:
            click.echo(line)
        failed = failed or bool(failures)
    sys.exit(1 if failed else 0)


@commands.command()
@click.option("--patches", callback=_patches, help="Ids, separated by commas; default: all.")
@jobs_option
def curves(patches: tuple[Patch, ...], jobs: int) -> None:
    """Train longer without each patch and with it: the losses are on record where they differ to the eye."""
    layout.build(layout.places(None), click.echo)
    with ThreadPoolExecutor(jobs) as pool:
        for patch, curve in zip(patches, pool.map(longer_runs.curve, patches), strict=True):
            click.echo(f"{patch.id}: {curve if isinstance(curve, str) else 'drawn'}")
            evidence.write_curve(patch, None if isinstance(curve, str) else curve)
