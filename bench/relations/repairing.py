"""``python -m bench.relations.repairing``: which patch repairs what a release violates, for the ledger.

Each claim that is violated without the patches runs with each patch alone that acts in it. What then agrees is
repaired by this patch, whatever the catalogue says of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trl_hotfix.relations.cells import VIOLATED
from trl_hotfix.relations.relations import RELATIONS

from bench.options import jobs_option, names_of, releases_option
from bench.proving import running
from bench.relations.asking import SECONDS_A_CLAIM, Work, ask, claims_of, trainers_option, works_of
from bench.releases.layout import BENCH, Place


def repaired(works: list[Work], jobs: int, console: Console) -> list[dict[str, Any]]:
    """Return what each patch repairs, for each claim that these works violate without the patches."""
    return running.in_parallel("trainers, by release", works, _run, jobs, console)


def _run(work: Work) -> Iterator[dict[str, Any]]:
    task = {"trainer": work.trainer, "claims": [(relation, str(claim)) for relation, claim in work.claims]}
    # Each claim runs with no patch, with all, and with a few alone.
    seconds, log = 60 + 5 * SECONDS_A_CLAIM * len(work.claims), f"repairing-{work.place}-{work.trainer}"
    answers, why = running.lines_of(work.place, "bench.relations.repairing_inside", task, seconds, log, work.overlays)
    if len(answers) < len(work.claims):
        raise RuntimeError(f"{work.trainer} on {work.place}: {len(answers)} of {len(work.claims)} claims: {why}")
    for answer in answers:
        yield {"place": str(work.place), "trainer": work.trainer, **answer}


def violated(
    places: Sequence[Place], trainers: Sequence[str], relations: Sequence[str], jobs: int, console: Console
) -> Iterator[Work]:
    """Give the works of the claims that are violated without the patches."""
    works = [
        work
        for place in places
        for trainer in trainers
        for work in works_of(place, trainer, claims_of(trainer, relations), on=False)
    ]
    wrong = {
        (answer["place"], answer["cell"]["trainer"], answer["cell"]["relation"], answer["cell"]["setting"])
        for answer in ask(works, jobs, console)
        if answer["cell"]["state"] == VIOLATED
    }
    for work in works:
        claims = tuple(
            (name, claim) for name, claim in work.claims if (str(work.place), work.trainer, name, str(claim)) in wrong
        )
        if claims:
            yield replace(work, claims=claims)


@click.command()
@releases_option
@trainers_option
@click.option("--relations", callback=names_of(RELATIONS), help="Separated by commas; default: all.")
@jobs_option
@click.option("--into", type=click.Path(dir_okay=False, path_type=Path), default=BENCH.parent / "build/repairing.json")
def command(
    places: tuple[Place, ...], trainers: tuple[str, ...], relations: tuple[str, ...], jobs: int, into: Path
) -> None:
    """Say which patch repairs what these releases violate, each on its main stack."""
    console = Console()
    works = violated([place for place in places if place.is_main], trainers, relations, jobs, console)
    answers = repaired(list(works), jobs, console)
    into.parent.mkdir(parents=True, exist_ok=True)
    into.write_text(json.dumps(answers, indent=1), encoding="utf-8")
    for answer in answers:
        by = "; ".join(f"{patch} ({len(gone)} of {len(answer['off'])})" for patch, gone in answer["repairs"].items())
        click.echo(
            f"{answer['place']} {answer['trainer']} {answer['relation']}: {answer['setting']}: {by or 'none alone'}"
        )


if __name__ == "__main__":
    command(prog_name="python -m bench.relations.repairing")
