"""One class for each kind of error. Its docstring tells what happened and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


class HotfixError(Exception):
    """The base class of all errors that trl_hotfix raises on purpose."""


MANY = 10
"""At most so many unknown names are listed. A variable can hold tens of thousands, and each suggestion takes time."""

LONG = 80
"""So many characters of a text that the user gave are in a message. A variable can hold a hundred thousand."""


REASON = 200
"""So many characters of what a parser says are in a message. It may quote the file."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a ``patches.yaml``: its line (1-based) and a message."""

    line: int
    message: str


class CatalogueError(HotfixError, ValueError):
    """``patches.yaml`` cannot be used; no patch was applied.

    Every mistake is listed with its line. Correct the file, or install trl_hotfix again if the file is not yours.
    """

    def __init__(self, path: str, mistakes: Sequence[Mistake]) -> None:
        self.path = path
        self.mistakes = tuple(sorted(mistakes, key=lambda mistake: (mistake.line, mistake.message)))
        count = f"{len(self.mistakes)} mistake{'s' if len(self.mistakes) != 1 else ''}"
        lines = "".join(f"\n  line {mistake.line}: {mistake.message}" for mistake in self.mistakes)
        super().__init__(f"{path} has {count}; no patch was applied:{lines}")


class PackError(HotfixError, LookupError):
    """A named pack is not installed, or breaks a rule for packs; nothing was changed.

    Check the spelling, or tell the author of the pack: docs/packs.md has the rules.
    """


class DamagedError(HotfixError):
    """A file of the installation cannot be used. Install trl_hotfix, or the pack that has the file, again."""

    def __init__(self, path: object, error: BaseException, distribution: str = "trl_hotfix") -> None:
        super().__init__(f"{path} cannot be read ({type(error).__name__}: {error}); install {distribution} again")


class ScriptError(HotfixError, ValueError):
    """The file cannot be scanned: it is missing, is neither Python nor YAML, or is for an unknown trainer.

    The message tells what was expected and what was found.
    """


class NotATrlError(HotfixError, ValueError):
    """The path is neither a wheel of TRL nor a folder in which TRL is installed, or a file in it cannot be read.

    Give a wheel (`pip download --no-deps trl==VERSION`), or the folder into which one was installed or unpacked.
    """


class UnknownPatchError(HotfixError, LookupError):
    """A requested patch id is not in the catalogue; nothing was changed.

    Check the spelling against ``python -m trl_hotfix --list``.
    """

    def __init__(
        self, unknown: Collection[str], known: Collection[str], source: str, without_repair: Collection[str] = ()
    ) -> None:
        self.unknown = tuple(sorted(unknown))
        hints = {name: ", a known bug that has no repair here" for name in self.unknown if name in without_repair}
        names = "; ".join(f"{quoted(name)}{hints.get(name) or suggestion(name, known)}" for name in self.unknown[:MANY])
        if len(self.unknown) > MANY:
            names += f"; and {len(self.unknown) - MANY} more"
        super().__init__(f"unknown patch in {source}: {names}. `python -m trl_hotfix --list` shows every id.")


class SettingError(HotfixError, ValueError):
    """A setting or an option of a patch is unknown or has an invalid value; nothing was changed.

    The message lists the valid ones.
    """


class NotAppliedError(HotfixError, RuntimeError):
    """Strict mode: a patch that should be on cannot be, and the patches that this step had put on are off again.

    The message names every such patch with its reason. Leave the patch out (``skip=``, ``TRL_HOTFIX_SKIP``), remove the
    cause, or run without strict mode to go on unpatched with a warning.
    """


def plain(text: str) -> str:
    """Return ``text`` in a form that is safe in logs and terminals: its repr if it has line breaks or escape codes."""
    return text if text.isprintable() else repr(text)


def printable(text: str, longest: int | None = None) -> str:
    """Return ``text`` on one line, with an escape for each character that a terminal would obey or a line ends at.

    What is longer than ``longest`` is cut.
    """
    shown = text if longest is None or len(text) <= longest else text[:longest]
    if not shown.isprintable():
        shown = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in shown)
    return shown if longest is None or len(text) <= longest else f"{shown}... ({len(text)} characters)"


def reason(error: Exception) -> str:
    """Return in some words, on one line, why a file cannot be used. What a parser says may quote the whole file."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, MemoryError):
        return "it is too large, or nested too deeply"
    text = str(error.strerror or error if isinstance(error, OSError) else error)
    # Python advises the program to raise its limit.
    if text.startswith("Exceeds the limit"):
        return "it has a number of thousands of digits"
    return printable(" ".join(text.split()), REASON) or type(error).__name__


def quoted(text: object, longest: int = LONG) -> str:
    """Return the repr of a text that the user gave. One that is longer than ``longest`` is cut."""
    if isinstance(text, str) and len(text) > longest:
        return f"{text[:longest]!r}... ({len(text)} characters)"
    return repr(text)


def listed(mistakes: Sequence[str]) -> str:
    """Return a line for each mistake, of which there may be too many to be read."""
    more = [f"and {len(mistakes) - MANY} more"] if len(mistakes) > MANY else []
    return "".join(f"\n  {mistake}" for mistake in [*mistakes[:MANY], *more])


def suggestion(name: str, known: Collection[str]) -> str:
    """Return ``; did you mean 'x'?`` with the known name that is most like ``name``, or an empty string."""
    import difflib  # It is imported only after a mistake, since it takes time.

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
