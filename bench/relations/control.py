"""The control: which bugs of the catalogue the relations find by themselves.

    python -m bench.relations.control

A bug is found if it is the cause of a finding of the ledger: a claim does not hold without the patches, and holds with
this one. ``repairing`` shows that by running. What no claim finds suggests the next relation, or the next setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import click

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch, Severity
from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

TRAINS_WRONGLY = (Severity.WRONG_GRADIENT, Severity.WRONG_LOSS, Severity.DATA_LOSS)


class Bug(NamedTuple):
    """A bug that trains a model wrongly, and the findings that it causes."""

    patch: Patch
    findings: tuple[Finding, ...]

    @property
    def found_by(self) -> str:
        """Return the relations that find it, each with the trainers, or nothing."""
        trainers: dict[str, dict[str, None]] = {}
        for finding in self.findings:
            trainers.setdefault(finding.relation, {}).update(dict.fromkeys(finding.trainers))
        return "; ".join(f"{relation} of {', '.join(names)}" for relation, names in trainers.items())


def bugs(patches: Iterable[Patch], findings: Sequence[Finding]) -> list[Bug]:
    """Return the bugs of gradients, losses and data, those that are found first."""
    found = [
        Bug(patch, tuple(finding for finding in findings if finding.patch == patch.id))
        for patch in patches
        if patch.severity in TRAINS_WRONGLY
    ]
    return sorted(found, key=lambda bug: (not bug.findings, bug.patch.id))


@click.command()
def command() -> None:
    """Print a line for each bug, with the relations that find it, and how many are found."""
    found = bugs(loading.load(), ledger.load())
    for bug in found:
        click.echo(f"{bug.patch.id}: {bug.found_by or 'not found'}")
    click.echo(f"{sum(bool(bug.findings) for bug in found)} of {len(found)} are found")


if __name__ == "__main__":
    command(prog_name="python -m bench.relations.control")
