"""``list``: every patch, and whether it applies here."""

from __future__ import annotations

import os

import click

from .. import startup
from ..engine import apply
from ..report import as_json, show, table
from . import Exit, unsupported, with_packs


@click.command("list")
@click.option("--json", "as_data", is_flag=True, help="The report as JSON.")
@with_packs
def command(as_data: bool, packs: str | None) -> int:
    """Every patch: what it repairs, and whether it applies to the TRL installed here."""
    report = apply(dry_run=True, packs=packs)
    if as_data:
        click.echo(as_json(report))
    else:
        show(table(report))
        click.echo(f"trl_hotfix {report.trl_hotfix}, Python {report.python}, digest {report.digest}")
        click.echo(_start_hook())
    if unsupported(report.trl):
        return Exit.NO_TRL
    return Exit.FINE if report.ok else Exit.DEGRADED


def _start_hook() -> str:
    problem = startup.hook_problem()
    if problem is not None:
        return f"TRL_HOTFIX=1 does nothing here: {problem}. trl_hotfix.apply() in the script works."
    value = os.environ.get("TRL_HOTFIX", "")
    now = {"on": "on", startup.STRICT: "on, strict", "off": "off"}.get(startup.switch(value) or "off", "off")
    return f"TRL_HOTFIX=1 works here; it is {now} in this shell."
