"""docs/tour.md shows what its commands print: the script of the page, with a tiny model, on the newest release."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.releases.layout import main_place, releases
from launched import LAUNCHED

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "tour.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
SHOWN = dict(re.findall(r"^```text\n\$ (.*?)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE))
PREPARE = (
    "import sys; sys.path.insert(0, sys.argv[1]); import run_quickstart as run; run.make_models(); run.make_data()"
)
# As the `.pth` of an installed package does at the start of Python.
START = "import runpy, trl_hotfix.autostart as hook; hook.start(); runpy.run_path('train.py', run_name='__main__')"
NEWEST = releases()[-1]


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return the lines that each command prints, one after the other in one folder."""
    folder, place = tmp_path_factory.mktemp("tour"), main_place(NEWEST)
    variables = {**place.environment(), "HF_HUB_OFFLINE": "1"}
    subprocess.run([place.python, "-c", PREPARE, str(LAUNCHED)], cwd=folder, env=variables, check=True)
    # The newest releases compute in bfloat16 by default, for which transformers wants a GPU.
    script = re.sub(r'Config\(\s*"out",', r"\g<0> bf16=False, use_cpu=True,", SCRIPT)
    (folder / "train.py").write_text(script, encoding="utf-8")
    lines = {}
    for command in SHOWN:
        words = command.split()
        if words[0] == "trl-hotfix":  # The stacks of the releases lack the libraries of the commands.
            arguments = [sys.executable, "-m", "trl_hotfix", *words[1:]]
            environment = {**os.environ, "PYTHONPATH": str(CHECKOUT), "COLUMNS": "80"}
        else:
            arguments = [str(place.python), "-c", START]
            environment = {**variables, "TRL_HOTFIX": words[0].removeprefix("TRL_HOTFIX=")}
        process = subprocess.run(arguments, cwd=folder, env=environment, capture_output=True, text=True, check=False)
        assert process.returncode in (0, 1), process.stderr[-2000:]
        lines[command] = (process.stdout + process.stderr).splitlines()
    return lines


def test_the_page_is_short_and_goes_from_the_scan_to_the_status() -> None:
    assert len(PAGE.split()) <= 300
    steps = re.findall(r"(?:trl-hotfix |TRL_HOTFIX=)(scan|observe|1|status)\b", "\n".join(SHOWN))
    assert steps == ["scan", "observe", "1", "status"]


@pytest.mark.parametrize("command", SHOWN)
def test_a_command_prints_what_is_shown(command: str, printed: dict[str, list[str]]) -> None:
    remaining = iter(line.strip() for line in printed[command])
    for line in SHOWN[command].splitlines():
        assert line == "..." or line.strip() in remaining, (line, "\n".join(printed[command]))
