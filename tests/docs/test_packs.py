"""docs/packs.md shows the files of the example as they are. tests/process/test_packs.py installs and runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
EXAMPLE = DOCS / "examples" / "acme-trl-fixes"
PAGE = (DOCS / "packs.md").read_text(encoding="utf-8")
SHOWN = ("pyproject.toml", "acme_fixes/patches.yaml", "acme_fixes/patches/reward_accuracy_counts_ties.py")


@pytest.mark.parametrize("name", SHOWN)
def test_the_page_shows_the_file_as_it_is(name: str) -> None:
    _, heading, after = PAGE.partition(f"\n`{name}`:\n")
    assert heading
    assert after.partition("\n```")[2].partition("\n")[2].startswith((EXAMPLE / name).read_text() + "```\n")


def test_the_page_names_every_file() -> None:
    files = [path for path in EXAMPLE.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert len(files) == 6
    for path in files:
        assert path.name in PAGE
