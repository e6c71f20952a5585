"""Parse the variables of trl_hotfix. Only the standard library is imported: this is loaded at interpreter start."""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .errors import SettingError

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
STRICT = "strict"
STRICT_ALL = "strict-all"
STRICT_LEVELS = (STRICT, STRICT_ALL)
OBSERVE = "observe"

LOG = "TRL_HOTFIX_LOG"
LOG_CHOICES = ("quiet", "summary", "full")
LOG_FORMAT = "TRL_HOTFIX_LOG_FORMAT"
FORMAT_CHOICES = ("text", "json")
UNKNOWN_BODY_CHOICES = ("skip", "try")
VARIABLES = (
    "TRL_HOTFIX",
    *(f"TRL_HOTFIX_{name}" for name in ("ONLY", "SKIP", "OPTIONS", "PACKS", "CALLBACK", "EFFECT", "PATIENCE")),
    "TRL_HOTFIX_UNKNOWN_BODY",
    LOG,
    LOG_FORMAT,
)
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers tell a process its rank: torchrun, accelerate and DeepSpeed in the first, MPI in the others."""


def switch(value: str) -> str | None:
    """Return ``on``, ``off``, ``strict``, ``strict-all`` or ``observe`` for ``TRL_HOTFIX``; None if wrong."""
    value = value.strip().lower()
    if value in ON:
        return "on"
    if value in OFF:
        return "off"
    return value if value in (STRICT, STRICT_ALL, OBSERVE) else None


def main_switch() -> str:
    """Return ``TRL_HOTFIX`` as ``switch`` does, and ``"unset"`` if it is empty. Raises ``SettingError``."""
    value = os.environ.get("TRL_HOTFIX", "")
    setting = switch(value) if value.strip() else "unset"
    if setting is None:
        raise _not_understood("TRL_HOTFIX", value, (*ON, STRICT, STRICT_ALL, OBSERVE, *filter(None, OFF)))
    return setting


def callback_is_on() -> bool:
    """Return whether ``TRL_HOTFIX_CALLBACK`` is on, as it is by default. Raises ``SettingError``."""
    return _is_on("TRL_HOTFIX_CALLBACK", "1")


def effect_is_on() -> bool:
    """Return whether ``TRL_HOTFIX_EFFECT`` is on, which it is not by default. Raises ``SettingError``."""
    return _is_on("TRL_HOTFIX_EFFECT", "")


def _is_on(variable: str, default: str) -> bool:
    value = os.environ.get(variable, default)
    setting = switch(value)
    if setting not in ("on", "off"):
        raise _not_understood(variable, value, (*ON, *filter(None, OFF)))
    return setting == "on"


def tries_unknown_body(value: str) -> bool:
    """Return whether ``TRL_HOTFIX_UNKNOWN_BODY`` or the argument has the self-test decide. Raises ``SettingError``."""
    if value not in ("", *UNKNOWN_BODY_CHOICES):
        from .errors import SettingError, quoted

        raise SettingError(f"unknown_body (TRL_HOTFIX_UNKNOWN_BODY) is {quoted(value)}: expected 'skip' or 'try'")
    return value == "try"


def _not_understood(variable: str, value: str, valid: tuple[str, ...]) -> "SettingError":
    """Return the error for a variable whose value is not among the ``valid`` ones."""
    from .errors import SettingError, quoted, suggestion

    # Nearly every word is like one of the short ones.
    hint = suggestion(value.strip().lower()[:80], [word for word in valid if len(word) > 3])
    return SettingError(
        f"{variable}={quoted(value)} is not understood{hint or '.'} Expected one of {', '.join(valid)}."
    )


def misspelt() -> "list[tuple[str, str]]":
    """Return each variable that is set and is like one of ours, and the one that is meant.

    Others may begin with ``TRL_HOTFIX_`` too: Kubernetes sets some for a service of that name.
    """
    unknown = [name for name in os.environ if name.startswith("TRL_HOTFIX") and name not in VARIABLES]
    if not unknown:
        return []
    import difflib

    close = ((name, difflib.get_close_matches(name, VARIABLES, n=1, cutoff=0.85)) for name in unknown)
    return [(name, meant[0]) for name, meant in close if meant]


def without_our_variables() -> "dict[str, str]":
    """Return the environment of a fresh process: the user's, without the variables of trl_hotfix."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRL_HOTFIX")}


def choice(variable: str, choices: tuple[str, ...], default: str) -> tuple[str, bool]:
    """Return the choice that a variable makes, or ``default``, and whether its value is one of ``choices`` or empty."""
    value = os.environ.get(variable, "").strip().lower() or default
    return (value, True) if value in choices else (default, False)


def rank() -> int | None:
    """Return the rank that a launcher has told this process, or None."""
    for variable in RANK_VARIABLES:
        value = os.environ.get(variable, "")
        # The rank becomes part of each line, and a hostile number of many digits could not even be read.
        if value.isascii() and value.isdecimal() and len(value) < 10:
            return int(value)
    return None


def json_line(level: str, message: str, fields: "dict[str, object] | None" = None) -> str:
    """Return one line of the log as JSON. ``fields`` has the fields of its event."""
    import json
    from datetime import datetime, timezone

    time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    head = {"time": time, "level": level, "logger": "trl_hotfix", "rank": rank(), "pid": os.getpid()}
    return json.dumps({**head, "message": message, **(fields or {})}, default=str)


def warn(message: str, event: str) -> None:
    """Print a warning on standard error. ``logging`` and ``warnings`` take too long to load at interpreter start."""
    tell("WARNING", message, event)


def tell(level: str, message: str, event: str, **fields: object) -> None:
    """Print a message on standard error, as text or as JSON with its event and the fields of that."""
    from contextlib import suppress

    from .standard_error import BesideBars

    # Standard error may be closed or full, or may not accept every character. That must not end the user's import.
    # The list of the mistakes of a file has line breaks. Other control characters would reach the user's terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    text = f"trl_hotfix: {level}: {shown.encode('ascii', 'backslashreplace').decode()}"
    with suppress(OSError, ValueError):
        as_json = choice(LOG_FORMAT, FORMAT_CHOICES, "text")[0] == "json"
        line = json_line(level, message, {"event": event, **fields}) if as_json else text
        stream = BesideBars()
        stream.write(f"{line}\n")
        stream.flush()


def site_folders() -> list[str]:
    """Return the folders whose ``.pth`` files Python runs at its start."""
    import site

    # A disabled user directory must be left out: site does not read .pth files there.
    return [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]


def hook_problem() -> str | None:
    """Return why ``TRL_HOTFIX=1`` cannot work in this interpreter as it was started, or None if it can."""
    if getattr(sys.modules.get("trl_hotfix.autostart"), "_started", False):
        # The .pth file has run, wherever it is: pex and shiv put it into a folder that is no site directory.
        return None
    if sys.flags.no_site:
        return "Python runs with -S, which skips every .pth file"
    # -E and -I make Python ignore its own variables, such as PYTHONPATH, and no others.
    if not any(os.path.isfile(os.path.join(folder, "trl_hotfix_autoapply.pth")) for folder in site_folders()):
        return (
            "trl_hotfix_autoapply.pth is in no site directory of this Python (pip --target and PYTHONPATH do not "
            "make one); install trl_hotfix into this environment"
        )
    return None
