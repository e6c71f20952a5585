"""The option ``--shard K/N``: the heavy tests, marked ``matrix``, are run only with it, all or one part of N."""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHECKOUT = Path(__file__).parents[1]
LEFT_OUT = pytest.StashKey[int]()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to break; on the path, it shadows the installed one."""
    copy = tmp_path / "trl_hotfix"
    shutil.copytree(CHECKOUT / "trl_hotfix", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "patches.yaml", copy)
    return copy


@dataclass(frozen=True)
class Shard:
    """Part ``number`` of ``count`` parts of the matrix tests."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Shard:
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        if match is None or not 1 <= int(match[1]) <= int(match[2]):
            raise pytest.UsageError(f"--shard: expected K/N with K from 1 to N, such as 3/20; found {text!r}")
        return cls(int(match[1]), int(match[2]))

    def has(self, item: pytest.Item) -> bool:
        """Return whether the test is in this part. Tests of one file with the same parameters share their processes."""
        file, parameters = item.nodeid.partition("::")[0], item.name.partition("[")[2]
        name = f"{file}[{parameters}" if parameters else item.nodeid
        return int(hashlib.sha256(name.encode()).hexdigest(), 16) % self.count == self.number - 1


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", metavar="K/N", help="Run part K of N of the tests that are marked matrix; 1/1 is all.")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "matrix: takes long, or needs many releases; is run with --shard K/N only")
    shard_of(config)


def shard_of(config: pytest.Config) -> Shard | None:
    text = config.getoption("--shard")
    return None if text is None else Shard.parse(text)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the matrix tests of other shards, or all of them. ``-k`` and ``-m`` have selected before."""
    shard = shard_of(config)
    left_out = {item for item in items if item.get_closest_marker("matrix") and (shard is None or not shard.has(item))}
    if left_out:
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    config.stash[LEFT_OUT] = len(left_out)


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
