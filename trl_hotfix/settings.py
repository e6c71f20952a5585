"""Parse the variables of trl_hotfix. Only the standard library is imported: this is loaded at interpreter start."""

import os
import sys

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
STRICT = "strict"
OBSERVE = "observe"

LOG = "TRL_HOTFIX_LOG"
LOG_CHOICES = ("quiet", "summary", "full")
LOG_FORMAT = "TRL_HOTFIX_LOG_FORMAT"
FORMAT_CHOICES = ("text", "json")
RANK_VARIABLES = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
"""Where launchers tell a process its rank: torchrun, accelerate and DeepSpeed in the first, MPI in the others."""


def switch(value: str) -> str | None:
    """Return ``"on"``, ``"off"``, ``"strict"`` or ``"observe"`` for a value of ``TRL_HOTFIX``, or None if invalid."""
    value = value.strip().lower()
    if value in ON:
        return "on"
    if value in OFF:
        return "off"
    return value if value in (STRICT, OBSERVE) else None


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
    """Return one line of the log as JSON. ``fields`` are those of its event."""
    import json
    from datetime import datetime, timezone

    time = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    head = {"time": time, "level": level, "logger": "trl_hotfix", "rank": rank(), "pid": os.getpid()}
    return json.dumps({**head, "message": message, **(fields or {})}, default=str)


def warn(message: str) -> None:
    """Print one line on standard error. ``logging`` and ``warnings`` take too long to load at interpreter start."""
    from contextlib import suppress

    # Standard error may be closed or full, or may not accept every character. That must not end the user's import.
    # The list of the mistakes of a file has line breaks. Other control characters would reach the user's terminal.
    shown = "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in message)
    text = f"trl_hotfix: WARNING: {shown.encode('ascii', 'backslashreplace').decode()}"
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            as_json = choice(LOG_FORMAT, FORMAT_CHOICES, "text")[0] == "json"
            print(json_line("WARNING", message) if as_json else text, file=sys.stderr, flush=True)


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
