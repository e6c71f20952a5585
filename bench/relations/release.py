"""Ask a release and the one before, on their main stacks with the patches, and compare.

    python -m bench.relations.release 1.16.0 [--trainers SFT,DPO]

`make release` does it too. Answers are kept, so that this takes seconds after an edit of ``relations.yaml``.
"""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from trl_hotfix.relations import ledger
from trl_hotfix.relations.relations import RELATIONS

from bench.options import jobs_option
from bench.relations import asking, compared_report
from bench.relations.compared import Comparison, compared
from bench.releases import layout


def asked(release: str, before: str, trainers: Sequence[str], jobs: int, console: Console) -> Comparison:
    """Ask the release what is not known, and the one before likewise, and return how they differ."""
    older, newer = (layout.main_place(version) for version in (before, release))
    works = [
        work
        for place in (older, newer)
        for trainer in trainers
        for work in asking.works_of(place, trainer, asking.claims_of(trainer, RELATIONS), on=True)
    ]
    return compared(asking.ask(works, jobs, console), older, newer, ledger.load())


@click.command()
@click.argument("release", metavar="VERSION")
@asking.trainers_option
@jobs_option
def command(release: str, trainers: tuple[str, ...], jobs: int) -> None:
    """Print the section of the report on a new release. Exit code 1: a person has to look."""
    releases = layout.releases()
    if release not in releases[1:]:
        raise click.BadParameter(f"{release} is not among {', '.join(releases[1:])}")
    comparison = asked(release, releases[releases.index(release) - 1], trainers, jobs, Console())
    click.echo("\n".join(compared_report.markdown(comparison)))
    for line in comparison.for_a_person:
        click.echo(f"for a person: {line}")
    raise SystemExit(1 if any(comparison.for_a_person) else 0)


if __name__ == "__main__":
    command(prog_name="python -m bench.relations.release")
