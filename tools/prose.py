"""Find phrases that no engineer would say, in the pages, the catalogue and the package.

CONTRIBUTING.md, "How we write", has examples. ``python -m tools.prose`` ends with 1 and a line for each
finding in a file that has more of them than ``prose_baseline.txt`` allows, and for each file that has fewer, so that
the baseline can only shrink. ``--write`` lowers the baseline, and moves the lines of files that were moved. It needs
nothing but Python.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

CHECKOUT = Path(__file__).parents[1]
BASELINE = Path(__file__).with_name("prose_baseline.txt")
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


def mistakes(found: Mapping[str, list[Finding]], allowed: Mapping[str, int]) -> Iterator[str]:
    """Give a line for each finding in a file that has too many, and for each file that has fewer than it may."""
    for name, of_file in found.items():
        if len(of_file) > allowed.get(name, 0):
            may = allowed.get(name, 0)
            yield f"{name} has {len(of_file)} phrases that CONTRIBUTING.md advises against, and may have {may}:"
            yield from (f"{name}:{line}: {phrase!r}: {advice}" for line, phrase, advice in of_file)
    lower = [name for name in allowed if len(found.get(name, ())) < allowed[name]]
    for name in lower:
        yield f"{name} has {len(found.get(name, ()))} phrases, and its baseline is {allowed[name]}"
    if lower:
        yield "`python -m tools.prose --write` lowers the baseline"


def read_baseline(path: Path = BASELINE) -> dict[str, int]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return {name: int(count) for count, _, name in (line.partition(" ") for line in lines)}


def write_baseline(found: Mapping[str, list[Finding]], path: Path = BASELINE) -> None:
    """Write the baseline. Raises ``ValueError`` if it would grow: a phrase moves with its file, and no phrase comes."""
    total, allowed = sum(map(len, found.values())), sum(read_baseline(path).values())
    if total > allowed:
        raise ValueError(f"there are {total} phrases, and the baseline has {allowed}: it may only shrink")
    lines = [f"{len(of_file)} {name}\n" for name, of_file in sorted(found.items())]
    path.write_text("".join(lines), encoding="utf-8", newline="\n")


def main(arguments: list[str]) -> int:
    found = all_findings()
    if arguments == ["--write"]:
        try:
            write_baseline(found)
        except ValueError as error:
            print("\n".join([*mistakes(found, read_baseline()), str(error)]))
            return 1
        return 0
    lines = list(mistakes(found, read_baseline()))
    print("\n".join(lines) or f"prose: {sum(map(len, found.values()))} old phrases left, none new")
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
