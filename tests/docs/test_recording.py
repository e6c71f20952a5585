"""The recording in the docs is of the present commands and version, fits its screen, and tells nothing of a machine.

It is made anew for a release, and not for each patch: how many bugs are known may be another number by then.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "docs"))

import recording

from trl_hotfix import __version__
from trl_hotfix.catalogue import loading

CAST = recording.CAST.read_text(encoding="utf-8").splitlines()
_CONTROL = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def screens() -> dict[str, str]:
    """Return what is on the screen after each command, without colours."""
    text = "".join(json.loads(line)[2] for line in CAST[1:])
    shown = [_CONTROL.sub("", screen).replace("\r", "") for screen in text.split("\x1b[2J\x1b[H")[1:]]
    return {screen.partition("\n")[0].removeprefix("$ "): screen.partition("\n")[2] for screen in shown}


def test_each_command_has_a_screen_that_fits() -> None:
    assert tuple(screens()) == recording.COMMANDS
    for command, screen in screens().items():
        lines = sum(max(1, -(-len(line.rstrip()) // recording.COLUMNS)) for line in screen.rstrip("\n").split("\n"))
        assert lines < recording.ROWS, command


def test_the_header_tells_nothing_of_a_machine() -> None:
    assert json.loads(CAST[0]).keys() == {"version", "width", "height"}
    assert not re.search(r"/(home|root|tmp|work|Users)/", "".join(CAST) + recording.DRAWING.read_text(encoding="utf-8"))


def test_scan_finds_in_the_script_what_it_is_shown_to_find(tmp_path: Path) -> None:
    recording.write_inputs(tmp_path)
    (scan,) = (command for command in recording.COMMANDS if " scan " in command)
    words = [sys.executable, "-m", "trl_hotfix", *scan.split()[1:]]
    variables = {**os.environ, "COLUMNS": str(recording.COLUMNS)}
    process = subprocess.run(words, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    *now, _, _ = process.stdout.splitlines()
    assert "hit" in now[1]
    assert [line.rstrip() for line in screens()[scan].splitlines()][: len(now)] == now


def test_the_run_is_told_as_repaired_with_the_present_version() -> None:
    shown = "\n".join(screens().values())
    assert f"trl_hotfix {__version__}" in shown
    assert "repaired: sft-eos-masked-when-pad-is-eos" in shown
    assert {"reproduced", "fixed"} <= set(re.findall(r"\w+", shown))
    (patch,) = (patch for patch in loading.load() if patch.id == "sft-eos-masked-when-pad-is-eos")
    assert f"{patch.id} (r{patch.revision})" in shown


def test_the_picture_has_the_text_of_the_cast() -> None:
    drawn = recording.DRAWING.read_text(encoding="utf-8").replace("\xa0", " ")
    assert all(command.replace(">", "&gt;") in drawn for command in recording.COMMANDS)
