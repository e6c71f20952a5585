"""Compare what two commits add to the import of a trainer, each installed from its wheel, in one run.

    python -m benchmarks.two_commits a5e22bd HEAD              # on three releases of TRL, nine rounds
    python -m benchmarks.two_commits a5e22bd . --rounds 3      # `.` is the working tree

All times are CPU time. ``python -m benchmarks.two_commits --sample MODULE MODE`` is one process that imports MODULE.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
import time
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks import measure
from benchmarks.applying import TRAINERS

OFF, ON, UNTESTED = "off", "on", "untested"
"""``TRL_HOTFIX`` is unset, is 1, or is 1 and each self-test has its answer without being run.

``on`` less the time of the self-tests is too much: they leave objects behind, and so Python's garbage collector looks
through everything once more.
"""


def sample(module: str, mode: str) -> dict[str, float]:
    """Return the CPU time of importing the trainer's module in ms, and of it the fixed cost and the self-tests.

    The fixed cost is what happens before TRL's first line: our own imports, the catalogue and the gates.
    """
    begin = time.process_time()
    import_module("torch")
    imported = time.process_time() - begin
    # Every training imports it, when accelerate prepares the model. It is nobody's time, whichever comes first.
    import_module("torch._dynamo")
    fixed, self_tests = 0.0, SelfTests(mode)
    begin = time.process_time()
    if mode != OFF:
        os.environ["TRL_HOTFIX"] = "1"
        import_module("trl_hotfix.autostart").start()
        import_module("trl_hotfix.import_hooks").FINDER.run_before_import("trl")
        fixed = time.process_time() - begin
        self_tests.replace()
    import_module(module)
    imported += time.process_time() - begin
    return {"import_ms": imported * 1e3, "fixed_ms": fixed * 1e3, "self_tests_ms": self_tests.seconds * 1e3}


class SelfTests:
    """Time the self-tests, or answer for them: the bug is reproduced, then fixed."""

    def __init__(self, mode: str) -> None:
        self.mode, self.seconds = mode, 0.0
        self._answered: set[tuple[str, str]] = set()

    def replace(self) -> None:
        application = import_module("trl_hotfix.patching.application")
        modules, run = import_module("trl_hotfix.catalogue.modules"), application.self_test

        def self_test(patch: Any, module: Any, options: Any) -> Any:
            # One commit imports the patch's module here, and another earlier. It is no part of the self-test.
            modules.function_of(patch, patch.self_test, options)
            if self.mode == UNTESTED:
                return self._answer(patch.id, module.__name__)
            begin = time.process_time()
            try:
                return run(patch, module, options)
            finally:
                self.seconds += time.process_time() - begin

        application.self_test = self_test

    def _answer(self, patch: str, module: str) -> Any:
        model = import_module("trl_hotfix.model")
        verdict = model.Verdict.FIXED if (patch, module) in self._answered else model.Verdict.REPRODUCED
        self._answered.add((patch, module))
        return model.Outcome(verdict)


def install(commit: str, name: str) -> Path:
    """Return a folder with the package of a commit, installed from its wheel."""
    source = measure.CHECKOUT
    if commit != ".":
        source = measure.fresh_folder(f"two-commits/{name}-source")
        command = ["git", "-C", str(measure.CHECKOUT), "archive", commit]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(source)
    return measure.installed(source, f"two-commits/{name}")


def process(release: str, module: str, mode: str, folder: Path | None) -> dict[str, Any]:
    place = measure.place(release)
    path = os.pathsep.join(map(str, filter(None, (place.overlay, folder, measure.CHECKOUT))))
    command = [place.python, "-m", "benchmarks.two_commits", "--sample", module, mode]
    return measure.process(command, measure.release_environment(release, PYTHONPATH=path))


def compare(commits: dict[str, str], rounds: int) -> None:
    folders = {name: install(commit, name) for name, commit in commits.items()}
    print("| TRL | commit | fixed, ms | on / off | without self-tests / off | self-tests, ms | off, ms |")
    print("|---|---|---|---|---|---|---|")
    for release, module in TRAINERS.items():
        variants = {OFF: functools.partial(process, release, module, OFF, None)}
        for name, folder in folders.items():
            for mode in (ON, UNTESTED):
                variants[f"{name} {mode}"] = functools.partial(process, release, module, mode, folder)
        taken = measure.run_rounds(variants, rounds)
        for name, commit in commits.items():
            estimates = [
                (measure.estimate([samples[f"{name} {ON}"]["fixed_ms"] for samples in taken]), 0),
                (measure.ratio(taken, f"{name} {ON}", OFF, "import_ms"), 3),
                (measure.ratio(taken, f"{name} {UNTESTED}", OFF, "import_ms"), 3),
                (measure.estimate([samples[f"{name} {ON}"]["self_tests_ms"] for samples in taken]), 0),
                (measure.estimate([samples[OFF]["import_ms"] for samples in taken]), 0),
            ]
            cells = [f"{it.median:.{digits}f} ({it.low:.{digits}f}-{it.high:.{digits}f})" for it, digits in estimates]
            print(f"| {release} | {commit} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--sample":
        print(json.dumps(sample(*sys.argv[2:])))
    else:
        import click

        @click.command()
        @click.argument("before")
        @click.argument("after")
        @click.option("--rounds", type=click.IntRange(1), default=9)
        def main(before: str, after: str, rounds: int) -> None:
            """Print a table of what the commits BEFORE and AFTER cost."""
            compare({"before": before, "after": after}, rounds)

        main()
