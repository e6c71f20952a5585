"""A setting is followed, or stops ``import trl`` with one clear error and exit code 2; it stops no other program.

The interpreters are real ones, which start by the ``.pth`` line. TRL is a package without trainers that says that it is
0.11.4: what goes on is decided before one is imported. ``test_startup`` has some settings with the real TRL.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess
from typing import TYPE_CHECKING, Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.selection.set_digest import digest_of
from trl_hotfix.stopping import EXIT_CODE, WAY_ON

from launched.settings_table import ID, OTHER, ROWS, Row

if TYPE_CHECKING:
    from launched.environments import Environment

STUB = "0.11.4"
"""The version of the TRL in the environment ``stubbed``."""

REPORT = """
import json, sys, trl, trl_hotfix
report = trl_hotfix.status()
print(json.dumps([report.observe, [status.id for status in report if status.state.value == "pending"]]))
"""
WRONG = {"TRL_HOTFIX": "stict", "TRL_HOTFIX_SKIP": "nonsense", "TRL_HOTFIX_ONLY": "@/no/such/file"}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the rows name."""
    folder = tmp_path_factory.mktemp("policies")
    known = {patch.id: patch for patch in loading.load()}
    entries: list[dict[str, Any]] = [
        {"id": patch_id, "revision": known[patch_id].revision, "options": {}} for patch_id in (OTHER, ID)
    ]
    right = {"trl": STUB, "digest": digest_of(STUB, entries), "patches": entries}
    wrong_revision = [entries[0], {**entries[1], "revision": 99}]
    contents: dict[str, Any] = {
        "right": right,
        "deleted": {**right, "patches": entries[:1]},
        "other_trl": {**right, "trl": "0.12.0"},
        "revision": {**right, "digest": digest_of(STUB, wrong_revision), "patches": wrong_revision},
    }
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "garbage.json").write_text("patches:\n- all\n")
    return folder


@pytest.fixture(scope="module")
def processes(stubbed: Environment, policies: Path) -> dict[str, CompletedProcess[str]]:
    """The process of each row. Most of their time is that of the disk, so several run at once."""

    def started(row: Row) -> CompletedProcess[str]:
        variables = {name: value.replace("FOLDER", str(policies)) for name, value in row.variables.items()}
        return stubbed.code(REPORT, **variables)

    with ThreadPoolExecutor(4) as pool:
        return dict(zip([row.name for row in ROWS], pool.map(started, ROWS), strict=True))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_setting_is_followed_or_stops_the_import(row: Row, processes: dict[str, CompletedProcess[str]]) -> None:
    process = processes[row.name]
    if row.outcome == "stopped":
        assert (process.returncode, process.stdout) == (EXIT_CODE, ""), process.stderr
        assert process.stderr.startswith("trl_hotfix: ERROR: ")
        assert process.stderr.endswith(f"\n{WAY_ON}\n")
        assert process.stderr.count("trl_hotfix: ") == 1
        assert "Traceback" not in process.stderr
        assert "\x1b" not in process.stderr
    else:
        assert process.returncode == 0, process.stderr
        observes, ids = json.loads(process.stdout)
        assert observes == (row.outcome == "observe")
        assert bool(ids) == (row.outcome != "off")
        assert not row.ids or sorted(ids) == sorted(row.ids)
        assert not set(ids) & set(row.without)
    assert row.told in process.stderr
    assert row.told or not process.stderr


def test_there_are_forty_settings_with_names_of_their_own() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) >= 40


# Other programs.


@pytest.mark.parametrize(
    "words",
    [
        ("-c", "pass"),
        ("-m", "pip", "--version"),
        ("-m", "json.tool", "--help"),
        ("-c", "import importlib.util; assert importlib.util.find_spec('trl')"),
        ("-c", "import json, packaging.version, transformers"),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("wrong", [{"TRL_HOTFIX": "stict"}, {**WRONG, "TRL_HOTFIX": "1"}], ids=str)
def test_a_wrong_setting_stops_no_program_without_trl(
    stubbed: Environment, words: tuple[str, ...], wrong: dict[str, str]
) -> None:
    process = stubbed.run(*words, cwd=None, **wrong)
    assert process.returncode == 0, process.stderr
    assert "trl_hotfix" not in process.stderr


# How it is shown.


def test_code_that_can_do_without_trl_does_not_hide_it(stubbed: Environment) -> None:
    code = "try:\n import trl\nexcept ImportError: print('hidden')"
    process = stubbed.code(code, TRL_HOTFIX="stict")
    assert (process.returncode, process.stdout) == (EXIT_CODE, "")


def test_who_catches_everything_has_no_trl_all_the_same(stubbed: Environment) -> None:
    caught = "try:\n  import trl\n except Exception as error:\n  print(type(error).__name__)"
    code = f"import sys\nfor _ in range(2):\n {caught}"
    process = stubbed.code(f"{code}\nprint('trl' in sys.modules)\nimport trl", TRL_HOTFIX="stict")
    assert process.stdout.split() == ["SettingError", "SettingError", "False"]
    assert (process.returncode, process.stderr.count("did you mean 'strict'?")) == (EXIT_CODE, 1)


def test_a_collector_gets_it_as_one_object_with_its_event(stubbed: Environment) -> None:
    process = stubbed.code("import trl", TRL_HOTFIX="1", TRL_HOTFIX_SKIP="x", TRL_HOTFIX_LOG_FORMAT="json")
    (line,) = process.stderr.splitlines()
    told = json.loads(line)
    assert (told["level"], told["event"], told["error"]) == ("ERROR", "stopped", "UnknownPatchError")
    assert told["message"].endswith(WAY_ON)
    assert process.returncode == told["exit_code"] == EXIT_CODE


def test_an_error_of_the_program_is_shown_as_ever(stubbed: Environment) -> None:
    code = "try:\n import trl\nexcept Exception: pass\nraise KeyError('own')"
    process = stubbed.code(code, TRL_HOTFIX="stict")
    assert process.returncode == 1
    assert process.stderr.startswith("Traceback")
    assert "trl_hotfix" not in process.stderr


def test_a_prompt_is_not_ended(stubbed: Environment) -> None:
    process = stubbed.run("-i", "-c", "import trl", TRL_HOTFIX="stict")
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("did you mean 'strict'?") == 1
    assert "excepthook" not in process.stderr


def test_pytest_shows_it(stubbed: Environment, tmp_path: Path) -> None:
    (tmp_path / "test_trl.py").write_text("import trl\n")
    process = stubbed.run("-m", "pytest", "-p", "no:cacheprovider", cwd=tmp_path, TRL_HOTFIX="stict")
    assert process.returncode != 0
    assert "SettingError: TRL_HOTFIX='stict' is not understood; did you mean 'strict'?" in process.stdout


def test_a_pool_hands_it_to_the_process_that_asked(stubbed: Environment, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing\ndef work(_):\n    import trl\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        try:\n            pool.map(work, [0])\n"
        "        except LookupError as error:\n            print(error)\n"
    )
    process = stubbed.run(str(script), TRL_HOTFIX="1", TRL_HOTFIX_SKIP="x")
    assert process.stdout.startswith("unknown patch in TRL_HOTFIX_SKIP: 'x'"), process.stderr


# The other case: an error of ours.


@pytest.mark.parametrize(("value", "code"), [("1", 0), ("observe", 0), ("strict", 1)])
def test_a_damaged_installation_stops_strict_alone(stubbed: Environment, package: Path, value: str, code: int) -> None:
    (package / "data" / "patches.json").write_text("[")
    process = stubbed.run("-c", "import trl", TRL_HOTFIX=value, PYTHONPATH=str(package.parent))
    assert process.returncode == code, process.stderr
    assert ("trl_hotfix: WARNING: TRL stays unpatched: DamagedError" in process.stderr) == (code == 0)


EVENTS = {
    "damaged": "import sys; sys.modules['trl_hotfix.import_hooks'] = None; autostart.start()",
    "unpatched": "import trl_hotfix.api as api; del api.apply; autostart.apply_now()",
    "no-record": "import sys; sys.modules['trl_hotfix.recording.callback'] = None; autostart._add_callback(sys)",
    "log-setting": "import os; os.environ['TRL_HOTFIX_LOG'] = 'loud'; trl_hotfix.log.ensure_handler()",
    "switched-off": "import os; os.environ['TRL_HOTFIX'] = '0'; trl_hotfix.apply()",
    "options-unused": "trl_hotfix.apply(options={'grpo-loss-normalisation': {'normalisation': 'global'}})",
}


@pytest.mark.parametrize("event", EVENTS)
def test_every_message_of_the_start_has_its_event(stubbed: Environment, event: str) -> None:
    code = f"import trl_hotfix.log\nfrom trl_hotfix import autostart\nautostart._started = False\n{EVENTS[event]}"
    process = stubbed.code(code, TRL_HOTFIX_LOG_FORMAT="json", **({"TRL_HOTFIX": "1"} if event == "damaged" else {}))
    told = [json.loads(line) for line in process.stderr.splitlines()]
    assert [line["event"] for line in told if line["level"] == "WARNING"] == [event], process.stderr
    assert all("event" in line for line in told)
