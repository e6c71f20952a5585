"""Find the lines of transformers that releases of TRL work with, by training.

    python -m bench.releases.supports 1.16.0 [1.15.0 ...]

A line is a minor version of transformers. It is tried in its last patch release, beside the other pins of the nearest
stack. A release works with it if SFT, DPO, KTO and GRPO can be imported and train two steps. The search begins at the
ends of the release before it, or at its main stack, and goes on outwards until a line fails or is not allowed by the
metadata of TRL.

The virtual environments stay in ``.bench/stacks``. The lock of a new stack is what ``uv pip freeze`` prints for one.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

import click
from packaging.requirements import Requirement
from packaging.version import Version

from bench.proving import running
from bench.releases import layout
from bench.releases.layout import BENCH, Place

SECONDS = 900.0
"""The limit for four trainings."""

UNPINNED = {"transformers", "tokenizers", "huggingface-hub", "hf-xet", "fsspec"}
"""What follows from the version of transformers, and is resolved."""

Line = tuple[int, int]


def line_of(version: str) -> Line:
    major, minor, *_ = Version(version).release
    return major, minor


@functools.cache
def version_by_line() -> dict[Line, str]:
    """Return the last patch release of each line on PyPI, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "transformers"]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (available,) = (row for row in output.splitlines() if row.startswith("Available versions:"))
    versions = sorted((version.strip() for version in available.partition(":")[2].split(",")), key=Version)
    return {line_of(version): version for version in versions}


def allowed(release: str) -> list[Line]:
    """Return the lines of which the metadata of a release allow the last patch release, oldest first."""
    (distribution,) = metadata.distributions(path=[str(BENCH / "overlay" / release)], name="trl")
    (specifier,) = (
        requirement.specifier
        for requirement in map(Requirement, distribution.requires or ())
        if requirement.name == "transformers" and (requirement.marker is None or requirement.marker.evaluate())
    )
    return [line for line, version in version_by_line().items() if specifier.contains(version)]


def distance(line: Line, other: Line) -> int:
    lines = list(version_by_line())
    return lines.index(other) - lines.index(line)


def line_of_stack(stack: str) -> Line:
    return line_of(layout.versions(stack)["transformers"])


@functools.cache
def built(line: Line) -> str:
    """Lay out a virtual environment with this transformers if it is missing, and return its name."""
    stack = min(layout.stacks(), key=lambda stack: abs(distance(line, line_of_stack(stack))))
    name = f"transformers-{version_by_line()[line]}-like-{stack}"
    folder = BENCH / "stacks" / name
    if not layout.is_ready(folder, name):
        pins = [f"{package}=={pin}" for package, pin in layout.versions(stack).items() if package not in UNPINNED]
        packages = [f"transformers=={version_by_line()[line]}", *pins, *layout.settings()["plugin"]]
        layout.uv("venv", "--clear", "--python", sys.executable, str(folder))
        layout.uv("pip", "install", "--python", str(folder / "bin" / "python"), *packages)
        (folder / ".ready").write_text(name)
    return name


@functools.cache
def works(release: str, line: Line) -> bool:
    """Train, print why not, and return whether all trained."""
    answer = running.process(Place(release, built(line)), ["-m", "bench.inside.train_each", "{out}"], SECONDS)
    reasons = [answer] if isinstance(answer, str) else answer["failures"]
    click.echo(f"  {release} with {version_by_line()[line]}: {'; '.join(reasons) or 'works'}")
    return not reasons


def last_that_works(release: str, lines: Sequence[Line], start: Line) -> Line | None:
    """Return the last line that works, in a walk from ``start`` to the end of ``lines``, or back if ``start`` fails."""
    index = lines.index(start)
    if not works(release, start):
        return next((line for line in reversed(lines[:index]) if works(release, line)), None)
    while index + 1 < len(lines) and works(release, lines[index + 1]):
        index += 1
    return lines[index]


@click.command()
@click.argument("releases", nargs=-1, required=True)
def main(releases: tuple[str, ...]) -> None:
    """Print the first and the last line of transformers that each of RELEASES works with."""
    layout.build(layout.places(releases), click.echo)
    start = layout.main_place(releases[0]).stack
    ends = [line_of_stack(start)] * 2
    for release in releases:
        lines = allowed(release)
        for position, walk in enumerate((lines[::-1], lines)):
            nearest = min(walk, key=lambda line: abs(distance(line, ends[position])))
            last = last_that_works(release, walk, nearest)
            if last is None:
                raise click.ClickException(f"{release} works with no line on this side of {version_by_line()[nearest]}")
            ends[position] = last
        click.echo(f"{release}: {' to '.join(version_by_line()[line] for line in ends)}")


if __name__ == "__main__":
    main()
