"""The recording in the docs is of the present commands and version, and shows nothing of the machine that made it.

A release makes it again, and a patch does not: how many bugs are known may be another number by then.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from pathlib import Path

from trl_hotfix import __version__
from trl_hotfix.catalogue import loading

from tools import recording

DRAWN = recording.DRAWING.read_text(encoding="utf-8")
CHARACTER = 12.2
"""The width of a character in rich's pictures."""


def screens() -> dict[str, str]:
    """Return what each command prints in the picture, without colours."""
    lines: dict[float, str] = defaultdict(str)
    for element in ElementTree.fromstring(DRAWN).iter("{http://www.w3.org/2000/svg}text"):
        column, y = round(float(element.attrib["x"]) / CHARACTER), float(element.attrib["y"])
        if element.attrib["class"] != "recording-title":
            lines[y] = f"{lines[y]:{column}}{(element.text or '').rstrip()}"
    text = "\n".join(line.rstrip() for line in lines.values()).replace("\xa0", " ")
    parts = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_each_command_is_in_the_picture_with_its_output() -> None:
    assert tuple(screens()) == recording.COMMANDS
    assert all(screen.strip() for screen in screens().values())


def test_the_picture_tells_nothing_of_a_machine_and_loads_nothing() -> None:
    assert not re.search(r"/(home|root|tmp|work|Users)/", DRAWN)
    assert "url(http" not in DRAWN
    assert "@font-face" not in DRAWN


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
