"""Print how easily each page reads: ``uv run --with textstat==0.7.3 python -m tools.readability [COMMIT]``."""

from __future__ import annotations

import re
import subprocess
import sys

import textstat

BLOCKS = r"<!--.*?-->|^ *```.*?^ *```$|^\|.*?$|^#+ .*?$"
"""Matches what is no prose: comments, code, tables and headings."""


def prose(page: str) -> str:
    """Return the sentences of a page. An item of a list is one, and code within a sentence is a short word."""
    text = re.sub(BLOCKS, "\n", page, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`]+`", "it", re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text))
    text = re.sub(r"^ *(?:[-*]|\d+\.) +", "\n\n", text, flags=re.MULTILINE).replace("*", "")
    return " ".join(
        " ".join(block.split()).rstrip(".:;,") + "." for block in re.split(r"\n\s*\n", text) if block.strip()
    )


def main(commit: str = "HEAD") -> None:
    listed = subprocess.check_output(["git", "ls-tree", "--name-only", commit, "README.md", "docs/"], text=True)
    names = [name for name in listed.splitlines() if name.endswith(".md")]
    pages = {name: subprocess.check_output(["git", "show", f"{commit}:{name}"], text=True) for name in names}
    print(f"{'page':<24}{'words':>7}{'a sentence':>12}{'Flesch ease':>13}{'grade':>7}")
    for name, page in {**pages, "all": "\n\n".join(pages.values())}.items():
        text = prose(page)
        words = textstat.lexicon_count(text)
        length, syllables = words / textstat.sentence_count(text), textstat.syllable_count(text) / words
        ease, grade = 206.835 - 1.015 * length - 84.6 * syllables, 0.39 * length + 11.8 * syllables - 15.59
        print(f"{name:<24}{len(page.split()):>7}{length:>12.1f}{ease:>13.1f}{grade:>7.1f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
