"""Where the time of a run of pytest goes, by folder and by its slowest files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from pathlib import PurePosixPath

import pytest

SLOWEST = 8


class Times:
    """A plugin that adds up what setup, call and teardown of each test take, in seconds of one worker."""

    def __init__(self) -> None:
        self.by_file: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.by_file[report.nodeid.partition("::")[0]] += report.duration

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("seconds of all workers together")
        for line in self.lines():
            terminalreporter.write_line(line)

    def lines(self) -> list[str]:
        """Return a line for each folder below ``tests``, and for each of the slowest files."""
        by_folder: dict[str, float] = defaultdict(float)
        for file, seconds in self.by_file.items():
            by_folder["/".join(PurePosixPath(file).parts[:2])] += seconds
        rows = [*_slowest_first(by_folder), *_slowest_first(self.by_file)[:SLOWEST]]
        return [f"{seconds:7.0f}  {name}" for name, seconds in rows]


def _slowest_first(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(seconds.items(), key=lambda row: -row[1])
