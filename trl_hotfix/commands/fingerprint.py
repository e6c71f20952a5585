"""``fingerprint`` compares a TRL release that is not installed with the bodies on record."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypedDict

import click
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..catalogue import loading
from ..catalogue.packs import named
from ..errors import NotATrlError
from ..matching import versions
from ..matching.fingerprints import bodies_for
from ..matching.inherited import is_inherited
from ..matching.sources import Release
from ..model import Patch, Target
from ..reporting.lines import width
from ..reporting.table import block, show
from .common import Exit, with_packs

WIDE = 160
"""With fewer columns a table of six would break ids and names of methods."""

Word = Literal["matches", "fixed", "no bug", "unknown body", "inherited", "gone"]
"""``inherited``: TRL's class has it from transformers, whose version decides about the body."""


class Compared(TypedDict):
    """One target of a patch in the release: its body, the verdict on it, and the last release with the same body."""

    patch: str
    target: str
    in_range: bool
    body: str | None
    says: Word
    same_as: str | None


class Answer(TypedDict):
    """Every target of every patch, in the release that was read."""

    trl_hotfix: str
    trl: str
    targets: list[Compared]


@click.command("fingerprint")
@click.option(
    "--wheel", "path", required=True, type=click.Path(path_type=Path), help="A TRL wheel, or a folder with one."
)
@click.option("--json", "as_data", is_flag=True, help="The bodies as JSON.")
@with_packs
def command(path: Path, as_data: bool, packs: str | None) -> int:
    """Of a TRL release that is not installed: which patches match its bodies, which bodies changed, what is gone.

    It reads the wheel and imports nothing.
    """
    try:
        release = Release(path)
    except NotATrlError as error:
        raise click.ClickException(str(error)) from None
    patches = loading.known(named(packs, os.environ))
    rows = [_compared(release, patch, target) for patch in patches for target in patch.targets]
    if as_data:
        answer: Answer = {"trl_hotfix": __version__, "trl": release.version, "targets": rows}
        click.echo(json.dumps(answer, indent=2))
    else:
        show(_view(rows, release.version))
    unsure = any(row["in_range"] and row["says"] in ("unknown body", "gone") for row in rows)
    return Exit.DEGRADED if unsure else Exit.FINE


def _view(rows: Sequence[Compared], version: str) -> RenderableType:
    """Return a table. In a narrow terminal it is a list, since a table would break the ids."""
    if width() < WIDE:
        blocks: list[RenderableType] = [block(f"TRL {version}", 0, style="bold")]
        for row in rows:
            in_range = "in range" if row["in_range"] else "not in range"
            same_as = f", as in {row['same_as']}" if row["same_as"] is not None else ""
            blocks.append(block(row["patch"], 2, style="bold"))
            blocks.append(block(f"{row['target']}: {row['says']} ({in_range}; {row['body'] or 'no body'}{same_as})", 6))
        return Group(*blocks)
    view = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=f"TRL {version}", title_justify="left")
    for column in ("patch", "target", "in range", "body", "says", "same as"):
        view.add_column(column, overflow="fold")
    for row in rows:
        view.add_row(*map(_word, row.values()))
    return view


def _compared(release: Release, patch: Patch, target: Target) -> Compared:
    """Compare one target in ``release`` with the bodies on record."""
    body = release.body(target.module, target.attribute)
    known = bodies_for(patch.id)
    verdict = known.verdict(patch.id, target.name, body)
    words: dict[str | None, Word] = {"buggy": "matches", "fixed": "fixed", "absent": "no bug"}
    without: Word = "inherited" if is_inherited(release, target.module, target.attribute) else "gone"
    releases = known.releases_with(target.name, body)
    return {
        "patch": patch.id,
        "target": target.name,
        "in_range": versions.in_range(release.version, patch.range_of(target)),
        "body": body,
        "says": without if body is None else words.get(verdict, "unknown body"),
        "same_as": releases[-1] if releases else None,
    }


def _word(value: object) -> Text:
    words: dict[object, str] = {True: "yes", False: "no", None: "-"}
    return Text(words.get(value) or str(value))
