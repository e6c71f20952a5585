"""The screens of the commands at 60, 80 and 200 columns, in colour and without."""

from __future__ import annotations

import itertools
import json
import re
import textwrap
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.commands.main import NAMES, commands

from helpers.command_line import ID, run, runner

SCRIPT = """\
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
DPOTrainer('m', args=DPOConfig('x', precompute_ref_log_probs=True, padding_free=True))
SFTTrainer('m', args=SFTConfig('x', packing=True, completion_only_loss=True))
"""
KNOWN = loading.without_repair()[0].id
HIT = {"id": ID, "severity": "wrong-loss", "answer": "hit", "symptom": "s", "because": [], "unknown": []}
RECORD = {
    "patches": [{"id": ID, "revision": 1, "word": "called", "called": 9, "acted": 0}],
    "hits": [{**HIT, "id": KNOWN, "state": "skipped", "reason": "version"}],
}
SCREENS = (
    *("list", "list --all", "list --all --trl 1.16.0", f"explain {ID}", "doctor", "scan --trl 0.20.0 s.py"),
    *(f"explain {KNOWN}", "audit r.txt", "compare 0.16.1 1.16.0 s.py"),
    *("diff a.json b.json", "status a.json", f"verify {ID}", "fingerprint --wheel FOLDER", "--help"),
)
WIDTHS = (60, 80, 200)
_COLOUR = re.compile(r"\x1b\[[\d;]*m")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("screens")
    (folder / "s.py").write_text(SCRIPT)
    (folder / "r.txt").write_text("trl==0.16.1\ntransformers==4.50.3\n")
    (folder / "a.json").write_text(json.dumps(RECORD))
    (folder / "b.json").write_text('{"patches": []}')
    (folder / "trl-0.16.1.dist-info").mkdir()
    return folder


def ids() -> list[str]:
    return [bug.id for bug in (*loading.load(), *loading.without_repair())]


def broken(lines: list[str]) -> list[str]:
    """Return the ids that begin at the end of one line, and go on in the next."""
    known = ids()
    found = []
    for line, after in itertools.pairwise(lines):
        last, first = re.findall(r"[\w-]+$", line.rstrip()), re.findall(r"^\s*([\w-]+)", after)
        joined = (last or [""])[0] + (first or [""])[0]
        found += [name for name in known if name == joined and last and first and last[0] != name and first[0] != name]
    return found


def words(text: str) -> str:
    """Return a text without what differs between widths: its spaces, and the lines of tables."""
    return re.sub(r"[\s─━]+", "", text)


@pytest.mark.parametrize("screen", SCREENS)
def test_no_id_is_broken_and_nothing_is_cut_at_any_width(screen: str, folder: Path) -> None:
    known = ids()
    shown = {}
    files = {"FOLDER": folder, **{name: folder / name for name in ("s.py", "r.txt", "a.json", "b.json")}}
    arguments = [str(files.get(word, word)) for word in screen.split()]
    # verify imports TRL each time.
    is_slow = screen.startswith("verify")
    widths = WIDTHS[::2] if is_slow else WIDTHS
    for columns in widths:
        variables = {"COLUMNS": str(columns)}
        plain = run(*arguments, **variables)
        assert plain.returncode in (0, 1), plain.stderr
        assert "\x1b" not in plain.stdout
        lines = plain.stdout.splitlines()
        assert [line for line in lines if line != line.rstrip()] == []
        assert broken(lines) == []
        # A line is longer only for a word that is.
        too_long = [line for line in lines if len(line) > columns and len(line.split()) > 2]
        assert too_long == [] or screen == "--help", too_long
        shown[columns] = {name for name in known if re.search(rf"(?<![\w-]){name}(?![\w-])", plain.stdout)}
        if is_slow and columns != widths[0]:
            continue
        coloured = run(*arguments, **variables, FORCE_COLOR="1").stdout
        assert _COLOUR.sub("", coloured).isprintable() or "\x1b" not in _COLOUR.sub("", coloured)
        assert words(_COLOUR.sub("", coloured)) == words(plain.stdout)
    if not is_slow:
        assert plain.stdout == run(*arguments, **variables, FORCE_COLOR="1", NO_COLOR="1").stdout
    assert all(shown[columns] == shown[60] for columns in widths)


def test_a_broken_id_is_found() -> None:
    lines = textwrap.wrap(f"  hit  {ID}", 20, break_on_hyphens=False)
    assert broken(lines) == [ID] or broken([f"  {ID[:9]}", ID[9:]]) == [ID]
    assert broken([f"  {ID}", ID]) == []


@pytest.mark.parametrize("name", NAMES)
def test_a_help_is_no_wider_than_80_columns(name: str) -> None:
    help_text = runner().invoke(commands, [name, "--help"], terminal_width=80).output
    assert help_text.startswith("Usage: ")
    assert [line for line in help_text.splitlines() if len(line) > 80] == []
