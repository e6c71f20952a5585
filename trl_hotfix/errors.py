"""One class for each mistake. A docstring says what happened and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


class HotfixError(Exception):
    """Base of all errors that trl_hotfix raises on purpose."""


MANY = 10
"""So many unknown names are told; a variable can hold tens of thousands, and a suggestion for each takes its time."""


@dataclass(frozen=True, slots=True)
class Mistake:
    """One mistake in a ``patches.yaml``: the line it stands on (1-based) and what is wrong with it."""

    line: int
    message: str


class CatalogueError(HotfixError, ValueError):
    """``patches.yaml`` cannot be used; no patch was applied.

    Every mistake is listed with its line. Mend the file, or install trl_hotfix again if it is not yours.
    """

    def __init__(self, path: str, mistakes: Sequence[Mistake]) -> None:
        self.path = path
        self.mistakes = tuple(sorted(mistakes, key=lambda mistake: (mistake.line, mistake.message)))
        count = f"{len(self.mistakes)} mistake{'s' if len(self.mistakes) != 1 else ''}"
        lines = "".join(f"\n  line {mistake.line}: {mistake.message}" for mistake in self.mistakes)
        super().__init__(f"{path} has {count}; no patch was applied:{lines}")


class PackError(HotfixError, LookupError):
    """A pack that was named is not installed, or is not one that may be used; nothing was changed.

    Check the spelling, or tell its author: docs/packs.md says what a pack must be.
    """


class DamagedError(HotfixError):
    """A data file of the installation cannot be read. Install trl_hotfix, or the pack that the file is of, again."""

    def __init__(self, path: object, error: Exception, distribution: str = "trl_hotfix") -> None:
        super().__init__(f"{path} cannot be read ({type(error).__name__}: {error}); install {distribution} again")


class ScriptError(HotfixError, ValueError):
    """A file that was to be scanned is none that can be: not there, not Python, not YAML, of an unknown trainer.

    The message says what was expected and what was found.
    """


class UnknownPatchError(HotfixError, LookupError):
    """A patch id that is not in the catalogue was asked for; nothing was changed.

    Check the spelling against ``python -m trl_hotfix --list``.
    """

    def __init__(self, unknown: Collection[str], known: Collection[str], where: str) -> None:
        self.unknown = tuple(sorted(unknown))
        named = "; ".join(f"{name!r}{suggestion(name, known)}" for name in self.unknown[:MANY])
        if len(self.unknown) > MANY:
            named += f"; and {len(self.unknown) - MANY} more"
        super().__init__(f"unknown patch in {where}: {named}. `python -m trl_hotfix --list` shows every id.")


class SettingError(HotfixError, ValueError):
    """A setting, or an option of a patch, is unknown or has a value that means nothing; nothing was changed.

    The message says which there are.
    """


class NotAppliedError(HotfixError, RuntimeError):
    """Strict mode: a patch that should be on cannot be, and whatever this step had put on was taken off again.

    The message names every such patch with its reason. Leave the patch out (``skip=``, ``TRL_HOTFIX_SKIP``), remove the
    cause, or run without strict mode to go on unpatched with a warning.
    """


def plain(text: str) -> str:
    """``text`` from outside, fit for a log and a terminal: its repr if it has line breaks or escape codes."""
    return text if text.isprintable() else repr(text)


def suggestion(name: str, known: Collection[str]) -> str:
    """``; did you mean 'x'?`` for the known name that is most like ``name``, or an empty string."""
    import difflib  # only who has made a mistake waits for it

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
