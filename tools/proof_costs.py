"""The figures of docs/cost-of-proof.md.

The site gets the tables from ``benchmarks/results.json``: ``make benchmarks NAMES=proving`` measures them.
``python -m tools.proof_costs build/ci-times.txt`` writes the times of the commands that ``.ci/run`` has put there.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import click

from tools import marked

CHECKOUT = Path(__file__).parents[1]
PAGE = CHECKOUT / "docs" / "cost-of-proof.md"
TABLES_MARK = "<!-- tables -->"
"""The site has the tables in place of this line of the page."""

RESULTS = CHECKOUT / "benchmarks" / "results.json"
CORES = 2


class Costs(NamedTuple):
    """Seconds of one core."""

    start: float
    cell: float
    proof: float

    def minutes(self, processes: float, cells: float, proofs: float) -> float:
        return (processes * self.start + cells * self.cell + proofs * self.proof) / CORES / 60


def measured() -> tuple[Costs, dict[str, Any]]:
    """Return the medians over the releases that were measured, and how much of everything is on record."""
    result = json.loads(RESULTS.read_text(encoding="utf-8"))["benchmarks"]["proving"]
    by_what: dict[str, list[float]] = {}
    for finding in result["findings"]:
        by_what.setdefault(finding["what"].partition(": ")[2], []).append(finding["median"])
    what = ("the start of a process", "a cell", "a proof")
    return Costs(*(statistics.median(by_what[name]) for name in what)), result["summary"]


def tables() -> str:
    costs, count = measured()
    patches, places = count["patches"], count["places"]
    new_places = places / count["releases"]
    rows = []

    def row(what: str, cells: float, processes: float, proofs: float) -> None:
        minutes = costs.minutes(processes, cells, proofs)
        time = f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"
        rows.append(f"| {what} | {cells:,.0f} | {proofs:,.0f} | {time} |")

    runs, trainings = count["runs of a patch"], count["proofs of a patch"]
    # Each run and each proof of one patch is in a place of its own.
    row("one new patch", runs, runs + trainings, trainings)
    row(f"a new release, {patches} patches", new_places * patches, 2 * new_places, count["proofs of the newest"])
    row(f"everything, {patches} patches", count["cells"], 2 * places, patches * trainings)
    more = 100 / count["releases"]
    row(
        "everything, 300 patches and 100 releases",
        300 / patches * more * count["cells"],
        2 * more * places,
        300 * more * trainings,
    )
    return "\n".join(
        [
            "| | seconds of one core |",
            "|---|---|",
            f"| to start a process and import TRL and its trainers | {costs.start:.1f} |",
            f"| a cell: a self-test, red, green and red | {costs.cell:.2f} |",
            f"| a proof, in a process with others of its place | {costs.proof:.1f} |",
            "",
            "| | self-tests | proofs | two cores |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def of_commands(times: str) -> str:
    """Return the times of the commands, without those of their parts, which are indented further."""
    return "".join(line for line in times.splitlines(keepends=True) if line[:6].strip())


@click.command()
@click.argument("ci", type=click.Path(exists=True, dir_okay=False, path_type=Path))
def main(ci: Path) -> None:
    """Write the times of a .ci/run into docs/cost-of-proof.md."""
    marked.write(PAGE, "ci", f"```text\n{of_commands(ci.read_text(encoding='utf-8'))}```\n")


if __name__ == "__main__":
    main()
