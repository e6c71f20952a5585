"""The shape of ``compare --json``."""

from __future__ import annotations

from typing import TypedDict


class Bug(TypedDict):
    """A known bug. ``hits``: whether it hits the script on the release that has it; None without a script.

    ``repair`` of trl_hotfix: "by default", "if named" or "none"; ``fixed_in`` is the first release with TRL's own.
    ``layer`` is the distribution that has the bug, null: TRL; ``fixed_in_layers`` has the first without it of others.
    """

    id: str
    title: str
    severity: str
    on_by_default: bool
    repair: str
    layer: str | None
    fixed_in: str | None
    fixed_in_layers: dict[str, str]
    hits: str | None


class Default(TypedDict):
    """An argument that the script leaves to TRL, or may, and its default in both releases, as source text.

    ``change`` is "default", "may be set", "gone" (the script sets it, and TRL's config does not define it any more) or
    "new". A default is null where the config does not define the argument.
    """

    name: str
    change: str
    before: str | None
    after: str | None
    position: str | None


class TrainerDefaults(TypedDict):
    """The defaults that change for one trainer of the script. ``unknown``: why we do not know them, or null."""

    trainer: str
    position: str
    changes: list[Default]
    unknown: str | None


class Answer(TypedDict):
    """What ``compare --json`` prints. ``newer_than_evidence``: nobody has proved the patches on these releases.

    ``versions`` has the versions of other distributions, as ``--with`` gives them.
    ``defaults`` has an entry for each trainer of the script; without a script it is null.
    """

    trl_hotfix: str
    first: str
    second: str
    script: str | None
    versions: dict[str, str]
    repaired: list[Bug]
    stay: list[Bug]
    brought: list[Bug]
    newer_than_evidence: list[str]
    defaults: list[TrainerDefaults] | None
