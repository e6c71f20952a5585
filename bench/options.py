"""Options that several commands of the bench have."""

from __future__ import annotations

import os
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


releases_option = click.option(
    "--releases", "places", callback=chosen_places, help="Separated by commas; default: all."
)
jobs_option = click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
shard_option = click.option("--shard", callback=_shard, help="K/N: the K-th of N parts.")
