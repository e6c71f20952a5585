"""Options that several commands of the bench have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import click

from bench.releases import layout
from bench.releases.layout import Place
from bench.shards import Shard


def chosen_places(context: Any, option: Any, value: str | None) -> tuple[Place, ...]:
    """Return the places of releases that are named with commas between them, or all."""
    try:
        return layout.places(value.split(",") if value else None)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _shard(context: Any, option: Any, value: str | None) -> Shard:
    try:
        return Shard.parse(value or "1/1")
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def names_of(table: Iterable[str]) -> Any:
    """Return the callback of an option that takes names of a table with commas between them, or all."""

    def chosen(context: Any, option: Any, value: str | None) -> tuple[str, ...]:
        names = tuple(value.split(",")) if value else tuple(table)
        unknown = sorted(set(names) - set(table))
        if unknown:
            raise click.BadParameter(f"unknown {', '.join(unknown)}; there are {', '.join(table)}")
        return names

    return chosen


releases_option = click.option(
    "--releases", "places", callback=chosen_places, help="Separated by commas; default: all."
)
jobs_option = click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
shard_option = click.option("--shard", callback=_shard, help="K/N: the K-th of N parts.")
