"""Write ``trl_hotfix/data/transformers.json``: the bodies of what TRL's classes inherit, by release of transformers.

    python -m tools.transformers_record                # what the stacks have
    python -m tools.transformers_record 5.3.0 5.4.0    # and releases between them, from their wheels
    python -m tools.transformers_record --check        # writes nothing, and fails if the stacks differ from it

What is on record stays there: releases do not change.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click
import msgspec

from trl_hotfix.catalogue.data_files import data_file
from trl_hotfix.matching import inherited

from bench.releases import layout

FILES = tuple(inherited.FILES.values())


def of_stacks() -> dict[str, dict[str, str]]:
    """Return the bodies in the transformers of each stack that is laid out, by its release."""
    found = {}
    for stack in layout.stacks():
        for folder in (layout.BENCH / "stacks" / stack).glob("lib/python3*/site-packages/transformers"):
            texts = {name: (folder / name).read_text(encoding="utf-8") for name in FILES}
            found[layout.versions(stack)["transformers"]] = inherited.read(texts)
    return found


def of_wheel(release: str) -> dict[str, str]:
    """Return the bodies in a release, from its wheel, which is downloaded."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder]
        subprocess.run([*command, f"transformers=={release}"], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            texts = {name: archive.read(f"transformers/{name}").decode("utf-8") for name in FILES}
    return inherited.read(texts)


@click.command()
@click.argument("releases", nargs=-1)
@click.option("--check", is_flag=True, help="Write nothing, and fail if a stack differs from what is on record.")
def main(releases: tuple[str, ...], check: bool) -> None:
    path: Path = data_file("transformers.json")
    record = msgspec.json.decode(path.read_bytes(), type=inherited.Record) if path.is_file() else None
    known = inherited.by_release(record) if record is not None else {}
    if check:
        differing = [release for release, bodies in of_stacks().items() if known.get(release) != bodies]
        if differing:
            raise click.ClickException(f"{path.name} has other bodies for {', '.join(differing)}, or none")
        return
    new = {release: of_wheel(release) for release in releases if release not in known}
    path.write_text(inherited.as_text(inherited.recorded({**known, **of_stacks(), **new})), encoding="utf-8")


if __name__ == "__main__":
    main()
