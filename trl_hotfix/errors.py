"""One class for each kind of error. Its docstring says what happened and what to do."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any


class HotfixError(Exception):
    """The base class of all errors that trl_hotfix raises on purpose."""

    stops_import = False
    """Whether it stops the import of TRL in every mode: what the user asked for cannot be understood, or be done.

    Any other error is one of ours, such as a damaged installation. It leaves TRL unpatched with one warning, and stops
    the import under strict alone.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # A pool sends the errors of its workers by pickle, which would call `__init__` with the message alone.
        return _again, (type(self), self.args), vars(self)


def _again(kind: type[HotfixError], args: tuple[Any, ...]) -> HotfixError:
    return kind.__new__(kind, *args)


MANY = 10
"""At most so many unknown names are listed. A variable can hold tens of thousands, and each suggestion takes time."""

LONG = 80
"""So many characters of a text that the user gave are in a message. A variable can hold a hundred thousand."""


SHOWN = 2_000
"""So many characters of any text are on a screen, in an annotation and in SARIF."""

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

    stops_import = True


class DamagedError(HotfixError):
    """A file of the installation cannot be used. Install trl_hotfix, or the pack that has the file, again."""

    def __init__(self, path: object, error: BaseException, distribution: str = "trl_hotfix") -> None:
        super().__init__(f"{path} cannot be read ({type(error).__name__}: {error}); install {distribution} again")


class ScriptError(HotfixError, ValueError):
    """The file cannot be scanned: it is missing, is neither Python nor YAML, or is for an unknown trainer.

    The message says what was expected and what was found.
    """


class NotATrlError(HotfixError, ValueError):
    """The path is neither a wheel of TRL nor a folder in which TRL is installed, or a file in it cannot be read.

    Give a wheel (`pip download --no-deps trl==VERSION`), or the folder into which one was installed or unpacked.
    """


class UnknownPatchError(HotfixError, LookupError):
    """A requested patch id is not in the catalogue; nothing was changed.

    Check the spelling against ``python -m trl_hotfix --list``.
    """

    stops_import = True

    def __init__(
        self, unknown: Collection[str], known: Collection[str], source: str, without_repair: Collection[str] = ()
    ) -> None:
        self.unknown = tuple(sorted(unknown))
        hints = {name: ", a known bug that has no repair here" for name in self.unknown if name in without_repair}
        names = "; ".join(f"{quoted(name)}{hints.get(name) or suggestion(name, known)}" for name in self.unknown[:MANY])
        if len(self.unknown) > MANY:
            names += f"; and {len(self.unknown) - MANY} more"
        end = "" if names.endswith("?") else "."
        super().__init__(f"unknown patch in {source}: {names}{end} `python -m trl_hotfix --list` shows every id.")


class SettingError(HotfixError, ValueError):
    """A setting or an option of a patch is unknown or has an invalid value; nothing was changed.

    The message lists the valid ones.
    """

    stops_import = True


class NotAppliedError(HotfixError, RuntimeError):
    """Strict mode ends a run that needs a repair and does not have it; ``strict-all`` ends it for any patch.

    The message names each patch with its reason, and what lets the run go on without it. Where ``apply()`` or an import
    raises it, the patches that this step had put on are off again.
    """


def plain(text: str) -> str:
    """Return ``text`` in a form that is safe in logs and terminals: its repr if it has line breaks or escape codes."""
    return text if text.isprintable() else repr(text)


def printable(text: str, longest: int | None = None) -> str:
    """Return ``text`` on one line, with an escape for each character that a terminal would obey or a line ends at.

    Of what is longer than ``longest``, the text says how many characters more there are.
    """
    kept = text if longest is None else text[:longest]
    if not kept.isprintable():
        kept = "".join(character if character.isprintable() else ascii(character)[1:-1] for character in kept)
    return kept if longest is None else kept + _rest(text, longest)


def shortened(text: str, longest: int) -> str:
    """Return the beginning of a text that is longer, and how many characters more it has."""
    return text[:longest] + _rest(text, longest)


def _rest(text: str, longest: int) -> str:
    return f"... ({len(text) - longest} more)" if len(text) > longest else ""


def described_error(error: Exception) -> str:
    """Return the class and the text of an error of other code. Making the text may fail; this does not.

    The log and the record keep this, since the error itself has frames, and so batches and outputs.
    """
    return f"{type(error).__name__}: {text_of(error)}"


def text_of(error: Exception) -> str:
    """Return the text of an error of any class."""
    try:
        return str(error)
    # The class may be of somebody else, and its text may raise anything.
    except Exception:  # noqa: BLE001
        return "its text cannot be made"


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
    return repr(text[:longest]) + _rest(text, longest) if isinstance(text, str) else repr(text)


def listed(mistakes: Sequence[str]) -> str:
    """Return a line for each mistake. There may be too many to read, so the last ones may be a number only."""
    more = [f"and {len(mistakes) - MANY} more"] if len(mistakes) > MANY else []
    return "".join(f"\n  {mistake}" for mistake in [*mistakes[:MANY], *more])


def suggestion(name: str, known: Collection[str]) -> str:
    """Return ``; did you mean 'x'?`` with the known name that is most like ``name``, or an empty string."""
    import difflib  # It is imported only after a mistake, since it takes time.

    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else ""
