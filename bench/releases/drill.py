"""Rehearse a new release: take one that is known out of a clone, and run ``make release`` there.

    python -m bench.releases.drill 1.16.0 [--trainers SFT,DPO]

The clone is ``build/drill``, of what is committed. Its bench shares the stacks, the other releases and what these have
answered to the relations, and has no other results. The output goes into ``build/drill.txt``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import click

from trl_hotfix.catalogue import evidence_file

from bench.relations.asking import trainers_option
from bench.releases.layout import BENCH, CHECKOUT

CLONE = CHECKOUT / "build" / "drill"
OUTPUT = CHECKOUT / "build" / "drill.txt"
BAR = re.compile(r"(no )?(self-tests|proofs|trainers), by")
"""A line of progress."""
REVIEW_BY = "2099-01-01"
"""For ranges that are open again. The end of the range takes it away."""


def without_release(text: str, release: str) -> str:
    """Return ``releases.yaml`` without a release that is the last of each list it is in."""
    return re.sub(rf',\s*"{re.escape(release)}"', "", text)


def with_open_ranges(text: str, release: str) -> str:
    """Return ``patches.yaml`` as it was before ``release`` ended ranges."""
    entries = re.split(r"(?m)^(?=- id: )", text)
    # For another entry the release may begin another target.
    ended = f'fixed_in: "{release}"'
    return "".join(
        "".join(_opened(entry.splitlines(keepends=True), release)) if ended in entry else entry for entry in entries
    )


def _opened(lines: Iterable[str], release: str) -> Iterator[str]:
    for line in lines:
        if re.match(r"\s+trl: ", line):
            yield line.replace(f",<{release}", "")
        elif line.startswith("  upstream: ") and f'fixed_in: "{release}"' in line:
            yield re.sub(rf'(, )?fixed_in: "{re.escape(release)}"', "", line)
            yield f"  review_by: {REVIEW_BY}\n"
        else:
            yield line


def without_findings(text: str, release: str) -> str:
    """Return ``relations.yaml`` without the findings that begin with a release. Those that it ended have no end."""
    parts = re.split(r"(?m)^(?=- relation: |# )", text)
    begins = re.compile(rf'(?m)^  trl: ">={re.escape(release)}\b')
    kept = "".join(part.replace(f",<{release}", "") for part in parts if not begins.search(part))
    return kept if "- relation: " in kept else "[]\n"


def share_answers(release: str, answers: Path, folder: Path) -> None:
    """Copy the answers of the relations, without those that the release has given itself."""
    folder.mkdir()
    for file in answers.glob("*.jsonl"):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        of_others = [line for line in lines if json.loads(line)["ran"].partition("@")[0] != release]
        if of_others:
            (folder / file.name).write_text("".join(of_others), encoding="utf-8")


def forget(release: str, folder: Path) -> None:
    """Take a release out of the evidence. A run that it shared with older releases becomes one of theirs."""
    for path in evidence_file.paths(folder):
        record = evidence_file.read(path)
        for kind in ("cells", "beneath", "proofs", "parity"):
            record[kind] = [
                entry for entry in record[kind] if release not in (entry["release"], entry.get("fixed_release"))
            ]
        for answer in [*record["cells"], *record["beneath"], *record["proofs"]]:
            if answer["ran"] == release:
                answer["ran"] = answer["release"]
        path.write_text(evidence_file.text(record), encoding="utf-8")


def prepare(release: str) -> None:
    """Make the clone in which the release is not known."""
    shutil.rmtree(CLONE, ignore_errors=True)
    subprocess.run(["git", "clone", "--quiet", str(CHECKOUT), str(CLONE)], check=True)
    edits = {
        "bench/releases/releases.yaml": without_release,
        "patches.yaml": with_open_ranges,
        "trl_hotfix/relations.yaml": without_findings,
    }
    for name, edit in edits.items():
        file = CLONE / name
        file.write_text(edit(file.read_text(encoding="utf-8"), release), encoding="utf-8")
    forget(release, CLONE / "evidence")
    (CLONE / ".bench").mkdir()
    for name in ("stacks", "bodies", "gradients"):
        (CLONE / ".bench" / name).symlink_to(BENCH / name)
    share_answers(release, BENCH / "relations", CLONE / ".bench" / "relations")
    overlays = CLONE / ".bench" / "overlay"
    overlays.mkdir()
    for overlay in (BENCH / "overlay").iterdir():
        if overlay.name != release:
            (overlays / overlay.name).symlink_to(overlay)


def rehearse(release: str, trainers: Sequence[str]) -> Iterator[str]:
    """Give the lines that ``make release`` prints in the clone, and then what came of it."""
    committed = subprocess.run(
        ["git", "show", "HEAD:patches.yaml"], cwd=CLONE, capture_output=True, text=True, check=True
    ).stdout
    began = time.monotonic()
    command = [sys.executable, "-m", "bench.releases.new_release", release, "--trainers", ",".join(trainers)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(CLONE), str(CLONE / "tests")])}
    with subprocess.Popen(command, cwd=CLONE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            click.echo(line, nl=False)
            yield line
    same = (CLONE / "patches.yaml").read_text(encoding="utf-8") == committed
    yield f"exit code {process.returncode} after {time.monotonic() - began:.0f} seconds\n"
    yield f"patches.yaml is {'' if same else 'NOT '}what it was before the drill\n"


@click.command()
@click.argument("release", metavar="VERSION")
@trainers_option
@click.option("--go-on", is_flag=True, help="In the clone, as an interrupted drill has left it.")
def main(release: str, trainers: tuple[str, ...], go_on: bool) -> None:
    """Rehearse a release that is known, as if it had come out today. All trainers together take hours."""
    if not go_on:
        prepare(release)
    lines = [line for line in rehearse(release, trainers) if not BAR.match(line)]
    OUTPUT.write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
