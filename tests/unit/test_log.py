"""The handler for programs that configure no logging, and the logger in programs that do."""

from __future__ import annotations

import json
import logging
import logging.config
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.errors import printable
from trl_hotfix.log import LONGEST_LINE, _FallbackHandler, log
from trl_hotfix.settings import LOG, LOG_FORMAT


@pytest.mark.parametrize("rank", ["%(nope)s", "5%", "0\n", "1]\x1b[31m", "x", "9" * 5000, "\u0663"])
def test_a_rank_that_is_no_number_is_left_out(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", rank)
    record = logging.LogRecord("trl_hotfix", logging.INFO, "", 0, "said", None, None)
    assert _FallbackHandler().format(record) == "trl_hotfix: INFO: said"


def heard(setup: str, message: str = "log.warning('is NOT on any more')", **variables: str) -> str:
    """Return what a program prints on standard error that sets up logging after our logger was made."""
    start = (
        "import logging, logging.config, sys\n"
        "from trl_hotfix.log import ensure_handler, event, level_of_repairs, log\n"
        "ensure_handler()\n"
    )
    clean = {key: value for key, value in os.environ.items() if key not in ("RANK", LOG, LOG_FORMAT)}
    process = subprocess.run(
        [sys.executable, "-c", f"{start}{setup}\n{message}"],
        env=clean | variables,
        capture_output=True,
        check=True,
    )
    # With text=True each "\r" of a progress bar would be a line break.
    return process.stderr.decode()


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


SAY_ALL = "log.debug('numbers'); log.log(level_of_repairs(), 'applied'); log.warning('is NOT on')"


@pytest.mark.parametrize(
    ("amount", "rank", "lines"),
    [
        ("", "", ["INFO: applied", "WARNING: is NOT on"]),
        ("summary", "0", ["INFO: applied", "WARNING: is NOT on"]),
        (" Summary ", "1", ["WARNING: is NOT on"]),
        ("quiet", "0", ["WARNING: is NOT on"]),
        ("full", "1", ["DEBUG: numbers", "INFO: applied", "WARNING: is NOT on"]),
    ],
)
def test_a_variable_chooses_how_much_is_said(amount: str, rank: str, lines: list[str]) -> None:
    prefix = f"trl_hotfix [rank {rank}]" if rank else "trl_hotfix"
    said = heard("", SAY_ALL, **{LOG: amount, "RANK": rank}).splitlines()
    assert said == [f"{prefix}: {line}" for line in lines]


def test_the_rank_of_mpi_counts_and_a_child_process_says_nothing() -> None:
    assert heard("", SAY_ALL, OMPI_COMM_WORLD_RANK="3") == "trl_hotfix [rank 3]: WARNING: is NOT on\n"
    child = "import multiprocessing.process as p\np.parent_process = lambda: p"
    assert heard(child, SAY_ALL) == "trl_hotfix: WARNING: is NOT on\n"


@pytest.mark.parametrize("variable", [LOG, LOG_FORMAT])
def test_an_unknown_value_is_one_line(variable: str) -> None:
    said = heard("ensure_handler()", SAY_ALL, **{variable: "loud\x1b[31m\n" + "x" * 1000}).splitlines()
    assert said[1:] == ["trl_hotfix: INFO: applied", "trl_hotfix: WARNING: is NOT on"]
    assert said[0].startswith(f"trl_hotfix: WARNING: {variable}='loud\\x1b[31m\\n")
    assert said[0].endswith(("quiet, summary, full; taken as summary", "text, json; taken as text"))
    assert said[0].isprintable()
    assert len(said[0]) < 200


def test_a_level_that_the_program_has_set_is_obeyed_before_the_variable() -> None:
    code = "import logging\nlogging.getLogger('trl_hotfix').setLevel('ERROR')\n"
    start = "from trl_hotfix.log import ensure_handler, log\nensure_handler()\nlog.warning('x')"
    process = subprocess.run(
        [sys.executable, "-c", code + start], env={**os.environ, LOG: "full"}, capture_output=True, check=True
    )
    assert process.stderr == b""


def test_a_collector_reads_one_object_a_line_whatever_the_program_has_set_up() -> None:
    message = "log.warning('is %s\\n\\x1b[31m', 'off', extra=event('not-on', patch='some-id', numbers={'a': object}))"
    variables = {LOG_FORMAT: "json", "RANK": "2"}
    setups = ("", "logging.basicConfig()", f"logging.config.dictConfig({ROOT % ''})")
    for setup in setups:
        (line,) = heard(setup, message, **variables).splitlines()
        said = json.loads(line)
        assert line.isprintable()
        assert said.pop("time").endswith("+00:00")
        assert said.pop("pid") > 0
        assert said == {
            "level": "WARNING",
            "logger": "trl_hotfix",
            "rank": 2,
            "message": "is off\\n\\x1b[31m",
            "event": "not-on",
            "patch": "some-id",
            "numbers": {"a": "<class 'object'>"},
        }
    (line,) = heard("from trl_hotfix.settings import warn", "warn('no \\x1b', 'made-up')", **variables).splitlines()
    assert json.loads(line)["message"] == "no \x1b"


@pytest.mark.parametrize("hostile", ["a\nb", "\x1b[2J", "\u202e", "\r", "\x9b31m", "\udc80", "\u2028"])
def test_no_control_character_reaches_a_handler(hostile: str, caplog: pytest.LogCaptureFixture) -> None:
    for arguments in (("%s", hostile), (hostile,), ("%(a)s", {"a": hostile})):
        log.warning(*arguments)
    assert all(message.isprintable() and message for message in caplog.messages)
    assert len(caplog.messages) == 3


def test_a_line_has_an_end_and_a_plain_one_keeps_its_arguments(caplog: pytest.LogCaptureFixture) -> None:
    log.warning("%s", "x" * 10**6)
    log.warning("%s is on", "some-id")
    assert len(caplog.messages[0]) < LONGEST_LINE + 50
    assert caplog.messages[0].endswith(f"... ({10**6 - LONGEST_LINE} more)")
    assert (caplog.records[1].msg, caplog.records[1].args) == ("%s is on", ("some-id",))
    assert printable("kept") == "kept"


def test_what_is_said_before_logging_is_loaded_has_no_control_character_either() -> None:
    said = heard("from trl_hotfix.settings import warn", "warn('a \\x1b[31m\\nof \u202e', 'made-up')")
    assert said == "trl_hotfix: WARNING: a \\x1b[31m\nof \\u202e\n"


def test_a_line_without_an_event_of_its_own_is_a_message() -> None:
    for message in ("log.warning('said by a patch')", "log.warning('x', extra=event('hit', patch='it'))"):
        (line,) = heard("", message, **{LOG_FORMAT: "json"}).splitlines()
        assert json.loads(line)["event"] == ("hit" if "hit" in message else "message")


# Beside progress bars

BAR = "import tqdm\nbar = tqdm.tqdm(total=9, mininterval=0, ascii=True)\nbar.update(3)\n"
TWO_LINES = "log.warning('first')\nlog.warning('second')\n"
ON_ITS_OWN = "trl_hotfix: WARNING: "


def own_lines(text: str) -> list[str]:
    """Return our lines. Each must be a whole line of the file, which "\\r" does not end."""
    return [line for line in text.split("\n") if line.startswith(ON_ITS_OWN)]


def test_a_line_of_a_file_is_never_glued_to_a_progress_bar() -> None:
    said = heard(BAR, f"{TWO_LINES}bar.update(6)\nbar.close()\nlog.warning('third')")
    assert own_lines(said) == [f"{ON_ITS_OWN}{word}" for word in ("first", "second", "third")]
    assert said.count(ON_ITS_OWN) == 3
    assert "\n\n" not in said
    # The bar goes on after it.
    assert "9/9" in said


def test_an_object_of_the_log_is_never_glued_to_a_progress_bar() -> None:
    said = heard(BAR, TWO_LINES, **{LOG_FORMAT: "json"})
    assert [json.loads(line)["message"] for line in said.split("\n") if line.startswith("{")] == ["first", "second"]


def test_what_is_said_before_logging_is_loaded_is_never_glued_to_a_progress_bar() -> None:
    assert own_lines(heard(BAR, "from trl_hotfix.settings import warn\nwarn('first', 'made-up')")) == [
        f"{ON_ITS_OWN}first"
    ]


@pytest.mark.parametrize(
    "bar",
    [
        "import tqdm, io\nbar = tqdm.tqdm(total=9, file=io.StringIO())",
        "import tqdm\nbar = tqdm.tqdm(total=9, disable=True)",
        "import tqdm\nbar = tqdm.tqdm(total=9, mininterval=0)\nbar.gui = True\nsys.stderr.write('\\n')",
        "import types\nsys.modules['tqdm'] = types.ModuleType('tqdm')",
    ],
    ids=["elsewhere", "disabled", "widget", "another tqdm"],
)
def test_where_no_bar_is_there_is_no_empty_line(bar: str) -> None:
    said = heard(bar, "log.warning('first')")
    assert said.endswith(f"{ON_ITS_OWN}first\n") or f"\n{ON_ITS_OWN}first\n" in said
    assert f"\n\n{ON_ITS_OWN}" not in said


def test_in_a_terminal_a_line_takes_the_place_of_the_bar() -> None:
    import pty

    script = f"import sys\nfrom trl_hotfix.log import ensure_handler, log\nensure_handler()\n{BAR}{TWO_LINES}"
    outer, inner = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", script], stderr=inner, stdout=inner) as process:
        os.close(inner)
        shown = b""
        while chunk := _read(outer):
            shown += chunk
        assert process.wait() == 0
    os.close(outer)
    # What a terminal shows of each line: "\r" goes back to its beginning.
    lines = [line.rsplit("\r", 1)[-1] for line in shown.decode().replace("\r\n", "\n").split("\n")]
    assert lines[:2] == [f"{ON_ITS_OWN}first", f"{ON_ITS_OWN}second"]


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # The other end is closed.
        return b""
