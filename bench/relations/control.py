"""The control: which bugs of the catalogue the relations find by themselves.

    python -m bench.relations.control

A bug is found if it is the cause of a finding of the ledger: a claim does not hold without the patches, and holds with
this one. ``repairing`` shows that by running. ``unseen.yaml`` says why no relation can see some of the others. What no
claim finds suggests the next relation, or the next setting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import click
import yaml

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Patch, Severity
from trl_hotfix.relations import ledger
from trl_hotfix.relations.ledger import Finding

TRAINS_WRONGLY = (Severity.WRONG_GRADIENT, Severity.WRONG_LOSS, Severity.DATA_LOSS)
UNSEEN = Path(__file__).with_name("unseen.yaml")
NOT_YET = "not found yet"


class Bug(NamedTuple):
    """A bug that trains a model wrongly, the findings that it causes, or why no relation can see it."""

    patch: Patch
    findings: tuple[Finding, ...]
    unseen: str = ""

    @property
    def found_by(self) -> str:
        """Return the relations that find it, each with its settings and the trainers, or nothing."""
        trainers: dict[str, dict[str, None]] = {}
        for finding in self.findings:
            setting = f" ({finding.setting})" if finding.setting else ""
            trainers.setdefault(f"{finding.relation}{setting}", {}).update(dict.fromkeys(finding.trainers))
        return "; ".join(f"{relation} of {', '.join(names)}" for relation, names in trainers.items())

    def __str__(self) -> str:
        return f"| {self.patch.id} | {self.found_by or self.unseen or NOT_YET} |"


def bugs(patches: Iterable[Patch], findings: Sequence[Finding], reasons: Mapping[str, str] | None = None) -> list[Bug]:
    """Return the bugs of gradients, losses and data: first those that are found, last those without a reason."""
    found = [
        Bug(
            patch,
            tuple(finding for finding in findings if finding.patch == patch.id),
            (reasons or {}).get(patch.id, ""),
        )
        for patch in patches
        if patch.severity in TRAINS_WRONGLY
    ]
    return sorted(found, key=lambda bug: (not bug.findings, not bug.unseen, bug.patch.id))


def reasons() -> dict[str, str]:
    """Return why no relation can see a bug, by its id."""
    found: dict[str, str] = yaml.safe_load(UNSEEN.read_text(encoding="utf-8"))
    return found


def mistakes(found: Sequence[Bug], reasons: Mapping[str, str]) -> Iterator[str]:
    """Give what is wrong about the reasons: one of a bug that is found, or of none."""
    by_id = {bug.patch.id: bug for bug in found}
    for name in reasons:
        if name not in by_id:
            yield f"{name} is no bug that trains wrongly"
        elif by_id[name].findings:
            yield f"{name} is found, and has a reason why it cannot be seen: {reasons[name]}"


@click.command()
def command() -> None:
    """Print a table of the bugs, with the relations that find each or why none can, and how many are found."""
    known = reasons()
    found = bugs(loading.load(), ledger.load(), known)
    click.echo("| bug | found by |\n|---|---|")
    for bug in found:
        click.echo(str(bug))
    seen, unseen = (
        sum(bool(part) for part in parts) for parts in zip(*((b.findings, b.unseen) for b in found), strict=True)
    )
    click.echo(
        f"{seen} of {len(found)} are found; {unseen} cannot be seen; {len(found) - seen - unseen} are not found yet"
    )
    wrong = list(mistakes(found, known))
    for line in wrong:
        click.echo(line, err=True)
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    command(prog_name="python -m bench.relations.control")
