"""What a run would repair, with the policy or the environment at hand: for ``--fail-on unrepaired``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import click

from ..catalogue import loading
from ..catalogue.packs import named
from ..matching import sources, versions
from ..model import State
from ..selection.selection import Selection
from ..settings import main_switch
from .freeze_elsewhere import report_elsewhere

with_policy = click.option(
    "--policy",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What a run repairs: a file of trl-hotfix freeze. Without it TRL_HOTFIX, _ONLY and _SKIP decide.",
)


def repaired_by_run(trl: str, told: Mapping[str, str], policy: Path | None, packs: str | None) -> frozenset[str]:
    """Return the ids of the bugs that a run with this TRL would repair. Raises ``SettingError``.

    A patch counts if it is proven on the code of this release. Without a policy, TRL_HOTFIX decides whether anything
    is repaired: we do not see a script that calls ``trl_hotfix.apply()`` by itself.
    """
    if policy is None and main_switch() not in ("on", "strict", "strict-all"):
        click.echo(
            "TRL_HOTFIX is not on here, so a run would repair nothing; --policy FILE names what it repairs", err=True
        )
        return frozenset()
    names = named(packs, os.environ)
    patches = loading.known(names)
    only, environment = (f"@{policy}", {}) if policy is not None else (None, os.environ)
    selection = Selection.of(only, None, environment, patches, None, names)
    files = sources.installed() if trl == versions.installed("trl") else None
    report = report_elsewhere(patches, selection, versions.installed_but(trl, told), files)
    return frozenset(status.id for status in report if status.state is State.PENDING)
