"""The examples of docs/quickstart.md are short, and run with a tiny model, here and on the newest TRL."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from bench.releases.layout import main_place, releases
from launched import LAUNCHED, TESTS

CHECKOUT = Path(__file__).parents[2]
PAGE = (CHECKOUT / "docs" / "quickstart.md").read_text(encoding="utf-8")
RUNNER = LAUNCHED / "run_quickstart.py"
EXAMPLE = re.compile(
    r"^## (?P<name>[^\n]+)\n\n<!-- quickstart: trl(?P<range>\S+) -->\n<!-- not run: .*? -->\n"
    r"```python\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)
EXAMPLES = {match["name"]: (match["range"], match["text"]) for match in EXAMPLE.finditer(PAGE)}


def run(release: str, python: Path | str, folder: Path, environment: dict[str, str]) -> str:
    """Return what the examples of a release print. Names that it has not yet are replaced, as the page says."""
    texts = {name: text for name, (trl, text) in EXAMPLES.items() if release in SpecifierSet(trl)}
    if release in SpecifierSet("<0.12.0"):
        texts = {name: text.replace("processing_class", "tokenizer") for name, text in texts.items()}
    if release in SpecifierSet("<0.29.0"):
        texts = {name: re.sub(r"from trl\.experimental\.\w+", "from trl", text) for name, text in texts.items()}
    # The newest releases compute in bfloat16 by default, for which transformers wants a GPU.
    texts = {
        name: text.replace('Config("out"', 'Config("out", bf16=False, use_cpu=True') for name, text in texts.items()
    }
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    offline |= {"TOKENIZERS_PARALLELISM": "false", "TRL_EXPERIMENTAL_SILENCE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.run(
        [str(python), str(RUNNER)],
        input=json.dumps(texts),
        cwd=folder,
        env=environment | offline,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout[-2000:]}\n{process.stderr[-4000:]}"
    assert [line.split(" in ")[0] for line in process.stdout.splitlines() if line.startswith("ran ")] == [
        f"ran {name}" for name in texts
    ]
    # Each run ends with the sum. A library of GKD has set the root logger up, which then prints the lines.
    sums = re.findall(r"INFO:(?: |trl_hotfix:)this run(?:: hit| hit none) ", process.stderr)
    assert len(sums) == len(texts), process.stderr[-4000:]
    return process.stdout


def test_each_trainer_has_a_short_example() -> None:
    assert PAGE.count("```python") == len(EXAMPLES) == 8
    for name, (_, text) in EXAMPLES.items():
        lines = [line for line in text.splitlines() if line.strip()]
        assert len(lines) <= 11, name
        assert max(map(len, lines)) <= 105, name


def test_the_examples_run_here(tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    run(version("trl"), sys.executable, tmp_path, variables | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{TESTS}"})


@pytest.mark.matrix
def test_the_examples_run_on_the_newest_release(tmp_path: Path) -> None:
    place = main_place(releases()[-1])
    run(place.release, place.python, tmp_path, place.environment())
