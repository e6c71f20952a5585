"""The command that would answer what a scan cannot tell: the user's, with the options that it lacks."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ..catalogue.facts import OF_DATASETS, OF_FILES
from ..matching.hits import Finding

_OF_LAUNCH = frozenset(["distributed", "processes"])
_OF_ZERO = frozenset(["zero_stage", "optimizer_offloaded"])
PLACEHOLDERS: Mapping[str, str] = {
    "--model": "DIR",
    "--dataset": "FILE",
    "--accelerate": "FILE",
    "--deepspeed": "FILE",
}
"""The options for facts, in the order of the command, with what stands for a value."""


class Asker:
    """Knows the options of this scan. ``given`` has those with a value; ``words`` come after ``--``, or are None."""

    def __init__(self, trl: str, given: Mapping[str, Sequence[str]], words: Sequence[str] | None) -> None:
        self._trl, self._given, self._words = trl, given, words

    def command(self, file: str, trainer: str, unsure: Iterable[Finding]) -> str | None:
        """Return the complete command, or None if no option would answer more."""
        unsure = list(unsure)
        lacking = {option for finding in unsure for option in _options(finding, trainer)} - self._given.keys()
        names = sorted({name for finding in unsure for name in _distributions(finding)})
        has_words = self._words is not None
        asks_words = not has_words and any(_asks_words(reason) for finding in unsure for reason in finding.unknown)
        if not (lacking or names or asks_words):
            return None
        parts = ["trl-hotfix", "scan", shlex.quote(file), "--trl", shlex.quote(self._trl)]
        for option, values in self._given.items():
            parts += [part for value in values for part in (option, shlex.quote(value))]
        parts += [part for name in names for part in ("--with", f"{name}==VERSION")]
        parts += [part for option in PLACEHOLDERS if option in lacking for part in (option, PLACEHOLDERS[option])]
        if self._words is not None:
            parts += ["--", *map(shlex.quote, self._words)]
        return " ".join([*parts, *(["--", "ARGUMENTS"] if asks_words else [])])


def _asks_words(reason: str) -> bool:
    return "parse_args" in reason or "of the command line" in reason


def _options(finding: Finding, trainer: str) -> Iterator[str]:
    """Yield the options whose files have a fact of a way into this bug."""
    if not any(reason.startswith("if ") for reason in finding.unknown):
        return
    for hit in finding.patch.hits:
        if "*" not in hit.trainers and trainer not in hit.trainers:
            continue
        for name in hit.facts:
            if name in _OF_ZERO:
                yield "--deepspeed"
            elif name in _OF_LAUNCH:
                yield "--accelerate"
            elif name in OF_DATASETS:
                yield "--dataset"
            elif name in OF_FILES:
                yield "--model"


def _distributions(finding: Finding) -> Iterator[str]:
    """Yield the distributions whose installed versions do not decide for another release of TRL."""
    for reason in finding.unknown:
        word, _, rest = reason.partition(" ")
        name = rest.partition(" ")[0]
        if word == "needs" and name in finding.patch.requires:
            yield name
