"""What the `.pth` may and may not do, as SECURITY.md promises it, by the events that Python's auditing reports."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from launched.environments import Environment

CHECKOUT = Path(__file__).parents[2]
WATCH = '''
"""Records the audit events between two lines of `.pth` files, or of the code of trl_hotfix until Python ends."""

import atexit, json, os, sys

EVENTS, state = [], {"on": False}


def ours():
    frame = sys._getframe()
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith("trl_hotfix"):
            return True
        frame = frame.f_back
    return False


def writes(arguments):
    path, mode, flags = arguments
    return bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_TRUNC))


def hook(event, arguments):
    if not state["on"] or state.get("within"):
        return
    # To look at the frames is an event too.
    state["within"] = True
    ignored = state["on"] == "ours" and not ours()
    state["within"] = False
    if ignored:
        return
    if event == "open":
        event = "open to write" if writes(arguments) else "open to read"
    if event == "ctypes.dlopen" and arguments[0] is None:
        event = "ctypes.dlopen of Python itself"
    # `arguments[0]` of "exec" and "object.*" is an object that need not have a text.
    EVENTS.append((event, str(arguments[0]) if arguments and isinstance(arguments[0], (str, bytes, int)) else ""))


def begin():
    sys.addaudithook(hook)
    state["on"] = True


def end():
    state["on"] = "ours" if os.environ.get("WATCH_LATER") else False
    state["modules"] = sorted(sys.modules)


def tell():
    state["on"] = False
    print(json.dumps({"events": EVENTS, "modules": state["modules"]}))


atexit.register(tell)
'''
HARMLESS = {
    "compile",
    "ctypes.dlopen of Python itself",  # what `import ctypes` does
    "exec",
    "import",
    "marshal.loads",
    "open to read",
    "os.listdir",
    "os.scandir",
    "sys._getframe",
    "sys._getframemodulename",
    "object.__getattr__",
    "object.__setattr__",
    "object.__delattr__",
    "code.__new__",
    "function.__new__",
    "builtins.id",
    "os.putenv",
}
"""The events of imports and of reading. Any other one fails, such as `socket.connect` or `subprocess.Popen`."""


class Watched(NamedTuple):
    events: list[tuple[str, str]]
    modules: set[str]
    """The modules that were loaded when Python's start was over."""

    def kinds(self) -> set[str]:
        return {event for event, _ in self.events}

    def imported(self) -> set[str]:
        return {name for event, name in self.events if event == "import"}


@pytest.fixture
def watched(own: Environment) -> Environment:
    """An environment with the wheel, in which the lines before and after the one of trl_hotfix record audit events."""
    (own.packages / "watch_start.py").write_text(WATCH)
    before, after = "a_watch.pth", "zz_watch.pth"
    assert before < "trl_hotfix_autoapply.pth" < after
    (own.packages / before).write_text("import watch_start; watch_start.begin()\n")
    (own.packages / after).write_text("import watch_start; watch_start.end()\n")
    return own


def events_of(environment: Environment, code: str, **variables: str) -> Watched:
    process = environment.code(code, PYTHONDONTWRITEBYTECODE="1", **variables)
    assert process.returncode == 0, process.stderr
    told: dict[str, Any] = json.loads(process.stdout.splitlines()[-1])
    return Watched([(event, text) for event, text in told["events"]], set(told["modules"]))


@pytest.mark.parametrize("variables", [{}, {"TRL_HOTFIX": ""}, {"TRL_HOTFIX": "0"}])
def test_switched_off_the_line_does_nothing(variables: dict[str, str], watched: Environment) -> None:
    seen = events_of(watched, "pass", **variables)
    own_line = ("open to read", str(watched.packages / "trl_hotfix_autoapply.pth"))
    assert own_line in seen.events, "the line was not between the two that watch"
    # Python reads and compiles the `.pth` files: what else is there would be of the line.
    others = [(event, text) for event, text in seen.events if not text.endswith(".pth")]
    assert {event for event, _ in others} <= {"exec", "compile", "import"}, others
    assert {name for event, name in others if event == "import"} <= {"os", "watch_start", "stat"}
    assert not any(name.startswith("trl_hotfix") for name in seen.modules)


def test_switched_on_the_line_loads_the_standard_library_and_ours_alone(watched: Environment) -> None:
    off, on = (events_of(watched, "pass", TRL_HOTFIX=value).modules for value in ("0", "1"))
    loaded = {name.partition(".")[0] for name in on - off}
    assert "trl_hotfix" in loaded
    assert loaded - {"trl_hotfix"} <= sys.stdlib_module_names


@pytest.mark.parametrize("value", ["1", "strict", "observe", "nonsense"])
def test_switched_on_the_line_reads_files_and_no_more(value: str, watched: Environment) -> None:
    seen = events_of(watched, "pass", TRL_HOTFIX=value)
    assert "trl_hotfix.autostart" in seen.imported()
    assert seen.kinds() <= HARMLESS


def test_importing_trl_reads_files_and_no_more(watched: Environment) -> None:
    # An empty TRL: what the imports of the real one do is not of trl_hotfix.
    for path, text in {
        "trl/__init__.py": "",
        "trl-0.11.4.dist-info/METADATA": "Metadata-Version: 2.1\nName: trl\nVersion: 0.11.4\n",
    }.items():
        (watched.packages / path).parent.mkdir()
        (watched.packages / path).write_text(text)
    seen = events_of(watched, "import trl", TRL_HOTFIX="1", WATCH_LATER="1")
    read = {Path(text).name for event, text in seen.events if event == "open to read"}
    assert "patches.json" in read, "the catalogue was not read: nothing was watched"
    assert seen.kinds() <= HARMLESS


def test_what_is_watched_would_be_noticed(watched: Environment) -> None:
    """A line that writes, connects and starts a process: otherwise the tests above could not fail."""
    line = watched.packages / "trl_hotfix_autoapply.pth"
    mischief = "open('written', 'w').close(); import socket, subprocess; socket.socket(); subprocess.run(['true'])"
    line.write_text(f"import os; {mischief}\n")
    assert {"open to write", "socket.__new__", "subprocess.Popen"} <= events_of(watched, "pass").kinds() - HARMLESS


@pytest.mark.parametrize("value", ["0", "1"])
def test_a_package_in_the_working_directory_is_not_loaded(value: str, own: Environment, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    for name in ("trl_hotfix", "settings", "wrapt"):
        (folder / name).mkdir(parents=True)
        for file in ("__init__.py", "autostart.py"):
            (folder / name / file).write_text("print('loaded from the working directory')\n")
    process = own.run("-c", "print('started')", cwd=folder, TRL_HOTFIX=value)
    assert process.stdout == "started\n", process.stderr


def test_the_security_policy_names_tests_that_there_are() -> None:
    policy = (CHECKOUT / "SECURITY.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (?!promise|version|---)(.+?) \| (`test_.+?`) \|$", policy, re.MULTILINE)
    files = re.findall(r"`(test_\w+\.py)`", policy)
    defined = {
        name
        for file in files
        for name in re.findall(r"^def (test_\w+)", (Path(__file__).parent / file).read_text(), re.MULTILINE)
    }
    assert len(rows) >= 7
    for promise, tests in rows:
        missing = set(re.findall(r"`(test_\w+)`", tests)) - defined
        assert not missing, f"SECURITY.md promises {promise!r} by {missing}, which {files} do not have"
