"""The ``fingerprints.json`` in the project of a pack: its place, and its content with one more release."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import click
import msgspec
from packaging.version import Version

from ..catalogue.packs import Pack
from ..errors import plain, reason
from ..matching.fingerprints import Bodies
from ..matching.versions import is_version


class Found(NamedTuple):
    """The body of one target, on which a patch is proved. ``of`` is what TRL's class inherits there from elsewhere."""

    patch: str
    target: str
    body: str
    of: str | None


def folder_of(pack: Pack, project: Path) -> Path:
    """Return the folder of the pack's package in ``project``. Its patches must be those that are installed."""
    folders = [project / pack.package, project / "src" / pack.package]
    folder = next((folder for folder in folders if (folder / "patches.yaml").is_file()), None)
    if folder is None:
        raise click.ClickException(
            f"{plain(str(project))} has no {pack.package}/patches.yaml: run this in the project of the pack, "
            "or name its folder, --project FOLDER"
        )
    prefix = f"{pack.package}/"
    for name, installed in sorted(pack.files.items()):
        if name.startswith(prefix) and name.endswith((".py", ".yaml")) and not _same(folder, name, prefix, installed):
            raise click.ClickException(
                f"{plain(str(folder / name.removeprefix(prefix)))} is not what {pack.release} has installed: "
                "install the pack again, so that what is proved is what you have here"
            )
    return folder


def _same(folder: Path, name: str, prefix: str, installed: Path) -> bool:
    source = folder / name.removeprefix(prefix)
    return source.is_file() and installed.is_file() and source.read_bytes() == installed.read_bytes()


def read(path: Path) -> Bodies:
    """Return the bodies in the file, or none if there is no file yet."""
    if not path.exists():
        return Bodies((), {})
    try:
        bodies = msgspec.json.decode(path.read_bytes(), type=Bodies)
        wrong = [release for release in _releases(bodies) if not is_version(release)]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is not a version of TRL")
    # Up to 0.20, msgspec's errors are not ValueErrors.
    except (OSError, ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise click.ClickException(
            f"{plain(str(path))} cannot be used: {reason(error)}; mend it, or delete it and prove each release again"
        ) from None
    return bodies


def merged(before: Bodies, trl: str, found: Iterable[Found]) -> Bodies:
    """Return the bodies with those that were found in this release. Those of other releases stay."""
    content = msgspec.to_builtins(before)
    for each in found:
        if each.of is None:
            known = content["targets"].setdefault(each.target, {}).setdefault(each.body, {"releases": [], "is": {}})
            known["releases"] = _with(known["releases"], trl)
            known["is"][each.patch] = "buggy"
        else:
            known = content["inherited"].setdefault(each.target, {"of": each.of, "by": [], "is": {}})
            known["by"] = _with(known["by"], trl)
            known["is"].setdefault(each.body, {})[each.patch] = "buggy"
        content["releases"] = _with(content["releases"], trl)
    after: Bodies = msgspec.convert(content, Bodies)
    return after


def write(path: Path, bodies: Bodies) -> None:
    """Write the whole file or nothing: until the end a reader finds the earlier content."""
    content = msgspec.to_builtins(bodies)
    if not content["inherited"]:
        del content["inherited"]
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise click.ClickException(f"{plain(str(path))} cannot be written: {error.strerror or error}") from None
    finally:
        partial.unlink(missing_ok=True)


def _releases(bodies: Bodies) -> list[str]:
    of_targets = (body["releases"] for by_body in bodies.targets.values() for body in by_body.values())
    of_inherited = (known["by"] for known in bodies.inherited.values())
    return [release for releases in (bodies.releases, *of_targets, *of_inherited) for release in releases]


def _with(releases: Iterable[str], release: str) -> list[str]:
    return sorted({*releases, release}, key=Version)
