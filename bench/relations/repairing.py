"""``python -m bench.relations.repairing``: which patch repairs what a release violates, for the ledger.

Each claim that is violated without the patches runs with each patch alone that acts in it. What then agrees is
repaired by this patch, whatever the catalogue says of it.

    python -m bench.relations.repairing --releases 1.16.0 --trainers SFT --relations options --setting packing
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.relations.cells import ERROR, VIOLATED
from trl_hotfix.relations.relations import RELATIONS

from bench.options import jobs_option, names_of, releases_option
from bench.proving import running
from bench.relations.asking import SECONDS_A_CLAIM, Work, ask, claims_of, trainers_option, works_of
from bench.releases.layout import BENCH, Place, settings


def repaired(works: list[Work], patches: Sequence[str], jobs: int, console: Console) -> list[dict[str, Any]]:
    """Return what each patch repairs, for each claim that these works violate without the patches.

    Without ``patches`` it is each that acts.
    """
    return running.in_parallel("trainers, by release", works, partial(_run, patches=patches), jobs, console)


def _run(work: Work, patches: Sequence[str]) -> Iterator[dict[str, Any]]:
    claims = [(relation, str(claim)) for relation, claim in work.claims]
    task = {"trainer": work.trainer, "claims": claims, "patches": list(patches)}
    # Each claim runs with no patch, with all, and with a few alone.
    seconds, log = 60 + 5 * SECONDS_A_CLAIM * len(work.claims), f"repairing-{work.place}-{work.trainer}"
    answers, why = running.lines_of(work.place, "bench.relations.repairing_inside", task, seconds, log, work.overlays)
    if len(answers) < len(work.claims):
        raise RuntimeError(f"{work.trainer} on {work.place}: {len(answers)} of {len(work.claims)} claims: {why}")
    for answer in answers:
        yield {"place": str(work.place), "trainer": work.trainer, **answer}


def violated(works: Sequence[Work], jobs: int, console: Console) -> Iterator[Work]:
    """Give the works with the claims that are violated without the patches, or whose runs fail."""
    wrong = {
        (answer["place"], answer["cell"]["trainer"], answer["cell"]["relation"], answer["cell"]["setting"])
        for answer in ask(works, jobs, console)
        if answer["cell"]["state"] in (VIOLATED, ERROR)
    }
    for work in works:
        claims = tuple(
            (name, claim) for name, claim in work.claims if (str(work.place), work.trainer, name, str(claim)) in wrong
        )
        if claims:
            yield replace(work, claims=claims)


def _works(place: Place, trainer: str, relations: Sequence[str], text: str, beside: Sequence[str]) -> Iterator[Work]:
    """Give the works of the claims with a text. ``beside`` are overlays in place of those that a claim names."""
    claims = [named for named in claims_of(trainer, relations) if text in str(named[1])]
    for work in works_of(place, trainer, claims, on=False):
        yield replace(work, overlays=tuple(beside)) if beside else work


@click.command()
@releases_option
@trainers_option
@click.option("--relations", callback=names_of(RELATIONS), help="Separated by commas; default: all.")
@click.option("--setting", default="", metavar="TEXT", help="Only claims with this text.")
@click.option("--stack", help="Default: the main stack of a release.")
@click.option("--beside", multiple=True, type=click.Choice(list(settings()["overlays"])), help="A package of its own.")
@click.option("--patch", "patches", multiple=True, type=click.Choice([patch.id for patch in loading.load()]))
@jobs_option
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), default=BENCH.parent / "build/repairing.json")
def command(
    places: tuple[Place, ...],
    trainers: tuple[str, ...],
    relations: tuple[str, ...],
    setting: str,
    stack: str | None,
    beside: tuple[str, ...],
    patches: tuple[str, ...],
    jobs: int,
    into: Path,
) -> None:
    """Say which patch repairs what these releases violate. Patches that are off by default need their name."""
    console = Console()
    works = [
        work
        for place in places
        if (place.stack == stack if stack else place.is_main)
        for trainer in trainers
        for work in _works(place, trainer, relations, setting, beside)
    ]
    answers = repaired(list(violated(works, jobs, console)), patches, jobs, console)
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    for answer in answers:
        by = "; ".join(f"{patch} ({len(gone)} of {len(answer['off'])})" for patch, gone in answer["repairs"].items())
        click.echo(
            f"{answer['place']} {answer['trainer']} {answer['relation']}: {answer['setting']}: {by or 'none alone'}"
        )


if __name__ == "__main__":
    command(prog_name="python -m bench.relations.repairing")
