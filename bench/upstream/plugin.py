"""A pytest plugin for the process that runs TRL's own tests: ``-p bench.upstream.plugin --upstream-out OUT.json``.

With ``TRL_HOTFIX=1`` every patch is applied as in a user's job. Python ignores a ``.pth`` on ``PYTHONPATH``, so the
plugin does what its line does. It writes the outcome of each test to ``OUT.json``, with the state of every patch at the
end and the tests in which its wrappers were called.

Each ``--upstream-gone MODULE.NAME`` is a name that the tests import and that this TRL has no more. A function that
returns None takes its place, so that the other tests of the file run.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PATCHED = os.environ.get("TRL_HOTFIX", "0") not in ("", "0")
LONGEST = 200

outcomes: dict[str, list[str]] = {}
calls: dict[str, set[str]] = {}
running: str | None = None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--upstream-out", required=True)
    parser.addoption("--upstream-gone", action="append", default=[])


def pytest_configure(config: pytest.Config) -> None:
    if PATCHED:
        arm()
    for path in config.getoption("--upstream-gone"):
        module, _, name = path.rpartition(".")
        setattr(importlib.import_module(module), name, lambda *_args, **_settings: None)
    # From 0.20 on TRL asks for bf16 by default, which transformers refuses without a GPU unless `use_cpu` is set. The
    # tests do not set it, so its default is changed.
    from transformers import TrainingArguments

    TrainingArguments.__dataclass_fields__["use_cpu"].default = True


def arm() -> None:
    """Do what the .pth does, and record which tests call a wrapper."""
    from trl_hotfix import autostart
    from trl_hotfix.catalogue import modules

    assert "trl" not in sys.modules, "TRL was imported before the patches could be armed"
    functions = modules.function_of

    def counted(patch: Any, name: str, options: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = functions(patch, name, options)

        @functools.wraps(function)
        def calling(*args: Any, **kwargs: Any) -> Any:
            # A self-test calls the wrappers too: only calls during a test of TRL are counted.
            if running is not None:
                calls.setdefault(patch.id, set()).add(running)
            return function(*args, **kwargs)

        return calling

    # The engine takes wrappers from here, and calls them as without the plugin.
    modules.function_of = counted
    autostart.start()


@pytest.fixture(autouse=True)
def same_seed() -> None:
    """Seed all generators, so that the two runs differ in the patches only."""
    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global running
    running = item.nodeid
    yield
    running = None


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    elif report.failed and report.when != "call":
        outcome = "error"
    # Of set-up, call and tear-down: the first that failed, else the call.
    if report.when == "call" or outcome != "passed":
        outcomes.setdefault(report.nodeid, [outcome, failure_text(report)])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed or (report.skipped and report.nodeid):
        outcomes[report.nodeid] = ["error" if report.failed else "skipped", failure_text(report)]


def failure_text(report: Any) -> str:
    """Return the first line of the error, or the last line of the report, of a test that did not pass."""
    if report.outcome == "passed":
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])[:LONGEST]
    crash = getattr(report.longrepr, "reprcrash", None)
    message = str(crash.message if crash is not None else report.longrepr)
    lines = [line for line in message.splitlines() if line.strip()]
    return (lines[0] if crash is not None else lines[-1])[:LONGEST] if lines else ""


def pytest_sessionfinish(session: pytest.Session) -> None:
    answer: dict[str, Any] = {"outcomes": outcomes, "states": {}, "calls": {}}
    if PATCHED:
        import trl_hotfix

        answer["states"] = {entry.id: [entry.state.value, entry.reason.value] for entry in trl_hotfix.status()}
        answer["calls"] = {patch: sorted(tests) for patch, tests in sorted(calls.items())}
    else:
        answer["loaded"] = sorted(name for name in sys.modules if name.partition(".")[0] == "trl_hotfix")
    Path(session.config.getoption("--upstream-out")).write_text(json.dumps(answer), encoding="utf-8")
