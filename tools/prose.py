"""Find phrases that no engineer would say, in the pages, the catalogue and the package.

CONTRIBUTING.md, "How we write", has examples. ``python -m tools.prose`` ends with 1 if there is one, and a line for
each. It needs nothing but Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]
FILES = ("*.md", "docs/**/*.md", ".github/**/*.md", "patches.yaml", "known.yaml", "trl_hotfix/**/*.py")
BE = "(?:is|are|was|were|be|been|being)"
RULES = {
    rf"{BE} told": "who tells whom? Let that be the subject",
    rf"{BE} said": "who says it? Let that be the subject: `applied` means ...",
    rf"(?:{BE}|not|one) looked at": "who looks? we check, the run reads",
    "of which": "begin a new sentence",
    r"(?:is|are|was|were) (?:that|those) (?:of|by|which|with|in|from)": "name the thing again, or use a verb",
    r"(?:there (?:is|are)|has|have|is|are) none": "say what is missing: has no attention mask",
    r"tells? (?:of|that|which|whether|how|why|what)": "a text says, a command shows, an argument decides",
    "(?:is|are|was|were) to (?:be|have)": "should, must, or a verb in the present",
    "anew": "again",
    "(?:has|have) it fixed": "TRL 1.9.1 fixed it",
    "(?i:whoever)": "if you ...",
}
"""The phrases, each with what to write instead. A blank of a phrase may be the end of a line."""

FRONTED = re.compile(
    r"(?:\A|(?<=[.:;]\s)|(?<=\n\n))(?:Of (?:this|these|those|them|what)|What (?:is|was|has)|Whether)\b(?![^.\n]*\?)"
)
"""Matches a sentence that begins with a clause in the subject's place. A question may."""

NOT_READ = re.compile(r"^```.*?^```$|<!-- prose: off -->.*?<!-- prose: on -->", re.DOTALL | re.MULTILINE)
"""Matches what is not our prose: code in a page, and examples of how not to write."""


class Finding(NamedTuple):
    line: int
    phrase: str
    advice: str


def findings(text: str) -> list[Finding]:
    """Return the phrases in a text, in order."""
    # Blank, and not gone, so that the lines keep their numbers.
    text = NOT_READ.sub(lambda match: re.sub(r"\S", " ", match[0]), text)
    patterns = {re.compile(rf"\b{phrase}\b".replace(" ", r"\s+")): advice for phrase, advice in RULES.items()}
    patterns[FRONTED] = "begin with the subject"
    found = [
        (match.start(), Finding(text.count("\n", 0, match.start()) + 1, " ".join(match[0].split()), advice))
        for pattern, advice in patterns.items()
        for match in pattern.finditer(text)
    ]
    return [finding for _, finding in sorted(found)]


def all_findings(checkout: Path = CHECKOUT) -> dict[str, list[Finding]]:
    """Return the findings of each file that has one, by its path in the checkout."""
    paths = sorted({path for pattern in FILES for path in checkout.glob(pattern)})
    found = {path.relative_to(checkout).as_posix(): findings(path.read_text(encoding="utf-8")) for path in paths}
    return {name: of_file for name, of_file in found.items() if of_file}


def lines_of(found: Mapping[str, list[Finding]]) -> list[str]:
    """Return a line for each finding, with its place and what to write instead."""
    return [f"{name}:{line}: {phrase!r}: {advice}" for name, each in found.items() for line, phrase, advice in each]


def main() -> int:
    lines = lines_of(all_findings())
    print("\n".join(lines) or "prose: no phrase that CONTRIBUTING.md advises against")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main())
