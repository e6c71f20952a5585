"""The option ``--shard K/N``: the heavy tests, marked ``matrix``, are run only with it, all or one part of N.

At the end each run prints where its time went.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import condensed, evidence_file, shipped

from bench.shards import Shard
from helpers import times

CHECKOUT = Path(__file__).parents[1]
ABSENT = [name for name in ("torch", "transformers", "trl", "datasets") if find_spec(name) is None]
"""What the import of a test, or a test, may fail for: it is skipped then, so that the others run without torch."""
LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package as a wheel has it, to break; on the path, it shadows the installed one."""
    copy = tmp_path / "trl_hotfix"
    shutil.copytree(CHECKOUT / "trl_hotfix", copy, ignore=shutil.ignore_patterns("__pycache__"))
    # What the build of a wheel makes of the catalogue and of the evidence.
    for name, encoded in shipped.files(CHECKOUT).items():
        (copy / "data" / name).write_bytes(encoded)
    for name, content in condensed.files(evidence_file.read_all(CHECKOUT / "evidence")).items():
        (copy / "data" / name).write_text(json.dumps(content))
    return copy


@pytest.fixture
def source(package: Path) -> Path:
    """A checkout with a copy of the package, whose catalogue is YAML; on the path, it shadows the installed one."""
    folder = package.parent
    for name in ("pyproject.toml", "patches.yaml", "known.yaml"):
        shutil.copy(CHECKOUT / name, folder)
    (folder / "evidence").symlink_to(CHECKOUT / "evidence")
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="Run part K of N of the tests that are marked matrix; 1/1 is all.")


def pytest_configure(config: pytest.Config) -> None:
    # Some runners set it. What a command prints into a pipe would then be folded.
    os.environ.pop("COLUMNS", None)
    config.addinivalue_line("markers", "matrix: takes long, or needs many releases; is run with --shard K/N only")
    config.addinivalue_line("markers", "needs_trl: needs an installed TRL, transformers or torch; others run without")
    shard_of(config)
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(times.Times())


def shard_of(config: pytest.Config) -> Shard | None:
    text = config.getoption("--shard")
    try:
        return None if text is None else Shard.parse(text)
    except ValueError as error:
        raise pytest.UsageError(f"--shard: {error}") from None


def group_of(item: pytest.Item) -> str:
    """Return the name that decides on the part: tests of one file in one place share a process, which imports TRL."""
    file, parameters = item.nodeid.partition("::")[0], item.name.partition("[")[2]
    values = getattr(getattr(item, "callspec", None), "params", {})
    where = next((str(values[name]) for name in ("place", "release") if name in values), "")
    if where:
        return f"{file}[{where}"
    return f"{file}[{parameters}" if parameters else item.nodeid


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the matrix tests of other shards, or all of them. ``-k`` and ``-m`` have selected before."""
    for item in items:
        if ABSENT and item.get_closest_marker("needs_trl"):
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(ABSENT)}, not installed"))
    shard = shard_of(config)
    left_out = {
        item for item in items if item.get_closest_marker("matrix") and (shard is None or not shard.has(group_of(item)))
    }
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] = len(left_out)


def needs_absent(text: str) -> str | None:
    """Return why a test that failed so is skipped here, or None."""
    match = re.search(rf"No module named '({'|'.join(ABSENT)})[.']", text) if ABSENT else None
    return f"needs {match[1]}, which is not installed" if match else None


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.failed and (reason := needs_absent(str(report.longrepr))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), None, f"Skipped: {reason}")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, None]:
    report = (yield).get_result()
    if report.failed and call.excinfo is not None and (reason := needs_absent(str(call.excinfo.value))):
        report.outcome, report.longrepr = "skipped", (str(item.path), None, f"Skipped: {reason}")


def pytest_report_header(config: pytest.Config) -> str:
    return f"matrix tests: {'none' if config.getoption('--shard') is None else config.getoption('--shard')}"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the controller of pytest-xdist, which collects nothing itself, how many tests a worker has left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left out"] = session.config.stash[LEFT_OUT]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = config.stash.get(LEFT_OUT, 0)
    if left_out and config.getoption("--shard") is None:
        terminalreporter.write_line(f"{left_out} matrix tests were left out: they need --shard 1/1 or `make matrix`")
