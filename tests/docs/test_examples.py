"""Every fenced example of the README and docs/ is run, unless the line before it has the reason why not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

CHECKOUT = Path(__file__).parents[2]
PAGES = (CHECKOUT / "README.md", CHECKOUT / "CONTRIBUTING.md", *sorted((CHECKOUT / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)$\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MARK = re.compile(r"<!-- not run: (.*?\S.*?) -->\n\Z", re.DOTALL)


class Example(NamedTuple):
    location: str
    language: str
    text: str
    not_run: str


def examples(page: Path) -> Iterator[Example]:
    text = page.read_text(encoding="utf-8")
    for fence in FENCE.finditer(text):
        before = text[: fence.start()]
        mark = MARK.search(before)
        location = f"{page.relative_to(CHECKOUT)}:{before.count(chr(10)) + 1}"
        if fence[1] in ("bash", "sh", "shell", "python", "console"):
            yield Example(location, fence[1], fence[2], mark[1] if mark else "")


EXAMPLES = [example for page in PAGES for example in examples(page)]
RUN = [example for example in EXAMPLES if not example.not_run]


@pytest.mark.parametrize("example", RUN, ids=[example.location for example in RUN])
def test_an_example_runs(example: Example, tmp_path: Path) -> None:
    variables = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    path = os.pathsep.join([str(Path(sys.executable).parent), variables["PATH"]])
    variables |= {"PATH": path, "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(CHECKOUT)}
    text = example.text
    if example.language == "console":  # A command follows a prompt, and its output does not.
        text = "".join(line.removeprefix("$ ") for line in text.splitlines(keepends=True) if line.startswith("$ "))
    command = [sys.executable, "-c", text] if example.language == "python" else ["bash", "-euo", "pipefail", "-c", text]
    process = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, check=False)
    assert process.returncode == 0, f"{example.location}\n{text}\n{process.stdout}\n{process.stderr}"
    assert "Traceback" not in process.stderr


def test_a_reason_stands_right_before_an_example() -> None:
    marks = sum(page.read_text(encoding="utf-8").count("<!-- not run") for page in PAGES)
    assert marks == len(EXAMPLES) - len(RUN)


def test_what_stands_in_the_pages_is_found() -> None:
    starts = sum(len(re.findall(r"^ *```\w", page.read_text(encoding="utf-8"), re.MULTILINE)) for page in PAGES)
    assert starts == sum(len(FENCE.findall(page.read_text(encoding="utf-8"))) for page in PAGES) - _without_language()


def _without_language() -> int:
    return sum(not fence[0] for page in PAGES for fence in FENCE.findall(page.read_text(encoding="utf-8")))
