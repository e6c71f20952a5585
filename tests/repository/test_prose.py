"""The prose check finds its phrases, and its baseline only shrinks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import prose

CHECKOUT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "text",
    [
        "`applied` is said of TRL's class.",
        "Bugs without a patch are\ntold too.",
        "The newest that was looked at.",
        "Patches, of which\n    one is on.",
        "The loss is that of the model.",
        "It adds one if there is none.",
        "The text tells whether it is hit.",
        "The loss is to be that.",
        "It begins anew.",
        "TRL 1.9.1 has it fixed.",
        "Whoever finds a hole.",
        "It reads. Of this the columns are noted.",
        "What is cut off is gone.",
        "It reads.\n\nWhether it is, nobody knows.",
    ],
)
def test_a_phrase_is_found_with_advice(text: str) -> None:
    assert prose.findings(text)
    assert all(finding.advice for finding in prose.findings(text))


@pytest.mark.parametrize(
    "text",
    [
        "`scan` reads your script and names each bug it hits.",
        "What is not repaired?",
        "## What is it?\n",
        "He said that he told her.",
        "```text\nit is said\n```\n",
        "<!-- prose: off -->\nit is said\n<!-- prose: on -->\n",
    ],
)
def test_an_engineers_sentence_is_not(text: str) -> None:
    assert prose.findings(text) == []


def test_a_finding_has_its_line() -> None:
    (finding,) = prose.findings("```\nis said\n```\nOne line.\nIt is\nsaid.\n")
    assert (finding.line, finding.phrase) == (5, "is said")


def one(line: int = 1) -> Any:
    return prose.Finding(line, "is said", "who says it?")


def test_more_than_the_baseline_is_a_mistake_with_each_place() -> None:
    lines = list(prose.mistakes({"a.md": [one(3), one(7)]}, {"a.md": 1}))
    assert lines[0].startswith("a.md has 2 phrases")
    assert [line.partition(": ")[0] for line in lines[1:]] == ["a.md:3", "a.md:7"]


def test_a_new_file_may_have_none() -> None:
    assert next(prose.mistakes({"new.md": [one()]}, {})).endswith("may have 0:")


def test_fewer_than_the_baseline_asks_to_lower_it() -> None:
    lines = list(prose.mistakes({"a.md": [one()]}, {"a.md": 2, "gone.md": 1}))
    assert lines[:2] == ["a.md has 1 phrases, and its baseline is 2", "gone.md has 0 phrases, and its baseline is 1"]
    assert "--write" in lines[2]


def test_as_many_as_the_baseline_is_right() -> None:
    assert list(prose.mistakes({"a.md": [one()]}, {"a.md": 1})) == []


def test_the_baseline_follows_a_file_and_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "baseline.txt"
    path.write_text("2 old/a.md\n")
    prose.write_baseline({"new/a.md": [one(), one()]}, path)
    assert prose.read_baseline(path) == {"new/a.md": 2}
    with pytest.raises(ValueError, match="it may only shrink"):
        prose.write_baseline({"new/a.md": [one()] * 3}, path)
    assert prose.read_baseline(path) == {"new/a.md": 2}


def test_the_checkout_is_as_its_baseline_says() -> None:
    process = subprocess.run(
        [sys.executable, "-m", "tools.prose"], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    assert process.returncode == 0, process.stdout


def test_no_title_of_a_bug_has_such_a_phrase() -> None:
    for name in ("patches.yaml", "known.yaml"):
        lines = (prose.CHECKOUT / name).read_text(encoding="utf-8").splitlines()
        titles = [line for line in lines if line.startswith("  title: ")]
        assert titles
        assert [title for title in titles if prose.findings(title)] == []
