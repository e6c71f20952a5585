"""Run inside one release: the tests of patches, each file in a fork of a process that has imported TRL.

    python -m bench.proving.patch_tests OUT.json SECONDS ID...

The answer has the outcome of each test, and its report if it did not pass.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading, modules

from bench.proving import release

FOLDER = Path(__file__).parents[2] / "tests" / "patches"


def file_of(patch_id: str) -> Path:
    """Return the file that has the tests of a patch, or would have them."""
    return FOLDER / modules.family_of(patch_id) / f"test_{patch_id.replace('-', '_')}.py"


@dataclass(eq=False)
class Outcomes:
    """A plugin of pytest that keeps the outcome of each test, with the report of one that did not pass.

    It has a hash, since pytest puts plugins into a set where a folder of tests has a ``conftest.py``.
    """

    by_test: dict[str, tuple[str, str]] = field(default_factory=dict)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.by_test[report.nodeid.partition("::")[2]] = (
                report.outcome,
                "" if report.passed else report.longreprtext,
            )

    def pytest_collectreport(self, report: Any) -> None:
        if not report.passed:
            self.by_test["collection"] = (report.outcome, report.longreprtext)


def outcomes(files: Sequence[Path], *options: str) -> dict[str, tuple[str, str]]:
    """Run these files in this process, and return the outcome of each test."""
    import pytest

    found = Outcomes()
    # The settings of the repository's other tests, and their conftest, are not meant for another environment.
    own = [f"--confcutdir={FOLDER}", f"--rootdir={FOLDER}", "-c", os.devnull, "--import-mode=importlib", "-W", "ignore"]
    # To collect garbage at the end takes as long as some tests do.
    own += ["-p", "no:cacheprovider", "-p", "no:unraisableexception"]
    with Path(os.devnull).open("w") as nothing, contextlib.redirect_stdout(nothing):
        pytest.main([*own, *options, *map(str, files)], plugins=[found])
    return found.by_test


def main(out: str, seconds: str, *ids: str) -> None:
    import pytest  # noqa: F401  imported before the forks

    import tiny  # noqa: F401

    release.warm([patch for patch in loading.load() if patch.id in ids])
    answers = {
        patch_id: release.alone(functools.partial(outcomes, [file_of(patch_id)]), float(seconds)) for patch_id in ids
    }
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
