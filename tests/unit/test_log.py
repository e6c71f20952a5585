"""The handler for programs that configure no logging, and the logger in programs that do."""

from __future__ import annotations

import logging
import logging.config
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.log import _FallbackHandler, log


@pytest.mark.parametrize("rank", ["%(nope)s", "5%", "0\n", "1]\x1b[31m", "x"])
def test_a_rank_that_is_no_number_is_left_out(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord("trl_hotfix", logging.INFO, "", 0, "said", None, None)
    assert _FallbackHandler().format(record) == "trl_hotfix: INFO: said"


def heard(setup: str, message: str = "log.warning('is NOT on any more')") -> str:
    """Return what a program prints on standard error that sets up logging after our logger was made."""
    start = "import logging, logging.config, sys\nfrom trl_hotfix.log import ensure_handler, log\nensure_handler()\n"
    process = subprocess.run(
        [sys.executable, "-c", f"{start}{setup}\n{message}"], capture_output=True, text=True, check=True
    )
    return process.stderr


ROOT = "{'version': 1, 'handlers': {'h': {'class': 'logging.StreamHandler'}}, 'root': {'handlers': ['h']}%s}"


def test_a_program_that_sets_up_logging_hears_our_warnings(tmp_path: Path) -> None:
    assert heard(f"logging.config.dictConfig({ROOT % ''})") == "is NOT on any more\n"
    assert heard("logging.config.dictConfig({'version': 1})") == "trl_hotfix: WARNING: is NOT on any more\n"
    file = tmp_path / "logging.ini"
    file.write_text(
        "[loggers]\nkeys=root\n[handlers]\nkeys=h\n[formatters]\nkeys=\n"
        "[logger_root]\nhandlers=h\n[handler_h]\nclass=StreamHandler\nargs=(sys.stderr,)\n"
    )
    assert heard(f"logging.config.fileConfig({str(file)!r})") == "is NOT on any more\n"


@pytest.mark.parametrize(
    "setup",
    [
        "logging.config.dictConfig(" + ROOT % ", 'loggers': {'trl_hotfix': {'level': 'CRITICAL'}}" + ")",
        "log.setLevel(logging.CRITICAL)",
        "log.disabled = True",
        "logging.getLogger('trl_hotfix').addFilter(lambda record: False)",
        "log.handlers, log.propagate = [logging.NullHandler()], False",
        "logging.disable()",
    ],
)
def test_a_program_that_silences_our_logger_by_name_is_obeyed(setup: str) -> None:
    assert heard(setup) == ""


def test_the_logger_is_an_ordinary_one() -> None:
    assert isinstance(log, logging.getLoggerClass())
    assert logging.getLogger("trl_hotfix") is log
    assert log.disabled is False


def test_a_logger_that_was_disabled_can_be_enabled(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    log.disabled = True
    log.warning("unheard")
    log.disabled = False
    log.warning("heard")
    assert caplog.messages == ["heard"]
