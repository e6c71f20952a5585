"""Compare what two commits add to the import of a trainer, each installed from its wheel, in one run.

    python benchmarks/two_commits.py a5e22bd HEAD              # on three releases of TRL, nine rounds
    python benchmarks/two_commits.py a5e22bd . --rounds 3      # `.` is the working tree

All times are CPU time. ``python two_commits.py --sample MODULE SWITCH`` is one process: it sets ``TRL_HOTFIX`` and
imports MODULE.
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

import measure
from applying import TRAINERS

OFF = "off"


def sample(module: str, switch: str) -> dict[str, float]:
    """Return the CPU time of importing the trainer's module in ms, and what of it is the fixed cost and self-tests.

    The fixed cost is what happens before TRL's first line: our own imports, the catalogue and the gates.
    """
    begin = time.process_time()
    import_module("torch")
    imported = time.process_time() - begin
    # Every training imports it, when accelerate prepares the model. It is nobody's time, whichever comes first.
    import_module("torch._dynamo")
    fixed, tests = 0.0, {"seconds": 0.0}
    begin = time.process_time()
    if switch != OFF:
        os.environ["TRL_HOTFIX"] = switch
        import_module("trl_hotfix.autostart").start()
        import_module("trl_hotfix.import_hooks").FINDER.run_before_import("trl")
        fixed = time.process_time() - begin
        _time_self_tests(tests)
    import_module(module)
    imported += time.process_time() - begin
    return {"import_ms": imported * 1e3, "fixed_ms": fixed * 1e3, "self_tests_ms": tests["seconds"] * 1e3}


def _time_self_tests(tests: dict[str, float]) -> None:
    application = import_module("trl_hotfix.patching.application")
    modules = import_module("trl_hotfix.catalogue.modules")
    untimed = application.self_test

    def self_test(patch: Any, module: Any, options: Any) -> Any:
        # One commit imports the patch's module here, and another earlier. It is no part of the self-test.
        modules.function_of(patch, patch.self_test, options)
        begin = time.process_time()
        try:
            return untimed(patch, module, options)
        finally:
            tests["seconds"] += time.process_time() - begin

    application.self_test = self_test


def install(commit: str, name: str) -> Path:
    """Return a folder with the package of a commit, installed from its wheel."""
    source = measure.CHECKOUT
    if commit != ".":
        source = measure.fresh_folder(f"two-commits/{name}-source")
        command = ["git", "-C", str(measure.CHECKOUT), "archive", commit]
        archive = subprocess.run(command, capture_output=True, check=True).stdout
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(source)
    folder = measure.fresh_folder(f"two-commits/{name}")
    measure.uv("pip", "install", "--compile-bytecode", "--no-deps", "--no-cache", "--target", folder, source)
    return folder


def process(release: str, module: str, folder: Path | None) -> dict[str, Any]:
    place = measure.place(release)
    path = os.pathsep.join(map(str, filter(None, (place.overlay, folder))))
    command = [place.python, __file__, "--sample", module, OFF if folder is None else "1"]
    return measure.process(command, measure.release_environment(release, PYTHONPATH=path))


def compare(commits: dict[str, str], rounds: int) -> None:
    folders = {name: install(commit, name) for name, commit in commits.items()}
    print("| TRL | commit | fixed, ms | import, on / off | without self-tests | self-tests, ms | import off, ms |")
    print("|---|---|---|---|---|---|---|")
    for release, module in TRAINERS.items():
        variants = {OFF: functools.partial(process, release, module, None)}
        variants |= {name: functools.partial(process, release, module, folder) for name, folder in folders.items()}
        taken = measure.run_rounds(variants, rounds)
        for name, commit in commits.items():
            print(f"| {release} | {commit} | {' | '.join(_columns(taken, name))} |", flush=True)


def _columns(rounds: list[measure.Round], name: str) -> list[str]:
    pairs = [(samples[name], samples[OFF]["import_ms"]) for samples in rounds]
    return [
        _shown([on["fixed_ms"] for on, _ in pairs], 0),
        _shown([on["import_ms"] / off for on, off in pairs], 3),
        _shown([(on["import_ms"] - on["self_tests_ms"]) / off for on, off in pairs], 3),
        _shown([on["self_tests_ms"] for on, _ in pairs], 0),
        _shown([off for _, off in pairs], 0),
    ]


def _shown(values: list[float], digits: int) -> str:
    found = measure.estimate(values)
    return f"{found.median:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


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
