"""Check the variables of trl_hotfix that are set here."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

from ... import settings
from ...catalogue import packs as third_party
from ...errors import HotfixError, plain, suggestion
from ...model import Patch
from ...selection.selection import Selection
from .answer import Problems, Variable


def checked_variables(patches: tuple[Patch, ...], packs: str | None, problems: Problems) -> list[Variable]:
    names = third_party.named(packs, os.environ)
    variables = []
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRL_HOTFIX"):
            try:
                problem = _problem(name, value, patches, names)
            except HotfixError as error:
                problem = str(error)
                problems.note(error)
            if problem is not None:
                problems.add(f"{name}={plain(value)}: {problem}", f"correct it, or unset {name}")
            variables.append(Variable(name=name, value=plain(value), problem=problem))
    if settings.switch(os.environ.get("TRL_HOTFIX", "") or "unset") == "off":
        problems.add(
            f"TRL_HOTFIX={os.environ['TRL_HOTFIX']} turns everything off, also an apply() in the script",
            "unset it, or set it to 1",
        )
    return variables


def _problem(name: str, value: str, patches: tuple[Patch, ...], packs: tuple[str, ...]) -> str | None:
    """Return the problem of a variable, or None. Raises ``HotfixError`` as the import of TRL would."""

    def selection() -> str | None:
        # If the manifest cannot be read, every id would be unknown.
        if patches:
            Selection.of(None, None, {name: value}, patches, None, packs)
        return None

    def of_packs() -> str | None:
        for pack in third_party.named(value, {}):
            third_party.find(pack)
        return None

    checks: dict[str, Callable[[], str | None]] = {
        "TRL_HOTFIX": lambda: _read(settings.main_switch),
        "TRL_HOTFIX_ONLY": selection,
        "TRL_HOTFIX_SKIP": selection,
        "TRL_HOTFIX_OPTIONS": selection,
        "TRL_HOTFIX_PACKS": of_packs,
        "TRL_HOTFIX_CALLBACK": lambda: _read(settings.callback_is_on),
        "TRL_HOTFIX_EFFECT": lambda: _read(settings.effect_is_on),
        "TRL_HOTFIX_PATIENCE": lambda: _unless(_is_seconds(value), "a number of seconds; it is taken as 60"),
        settings.LOG: lambda: _one_of(value, settings.LOG_CHOICES, "summary"),
        settings.LOG_FORMAT: lambda: _one_of(value, settings.FORMAT_CHOICES, "text"),
        "TRL_HOTFIX_UNKNOWN_BODY": lambda: _read(lambda: settings.tries_unknown_body(value)),
    }
    if name not in checks:
        return f"trl_hotfix has no such variable{suggestion(name, checks)}"
    return checks[name]()


def _read(setting: Callable[[], object]) -> None:
    """Raise ``SettingError`` if a variable is not understood."""
    setting()


def _unless(fine: bool, expected: str) -> str | None:
    return None if fine else f"expected {expected}"


def _one_of(value: str, choices: tuple[str, ...], default: str) -> str | None:
    known = value.strip().lower() in ("", *choices)
    return _unless(known, f"{', '.join(choices)}; it is taken as {default}")


def _is_seconds(value: str) -> bool:
    try:
        return not value or 0 <= float(value) < math.inf
    except ValueError:
        return False
