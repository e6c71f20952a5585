"""The prose check finds its phrases, and the checkout has none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

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


def test_a_line_has_the_place_and_the_advice() -> None:
    finding = prose.Finding(3, "is said", "who says it?")
    assert prose.lines_of({"a.md": [finding]}) == ["a.md:3: 'is said': who says it?"]


def test_the_checkout_has_no_such_phrase() -> None:
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
