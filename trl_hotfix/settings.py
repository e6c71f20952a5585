"""Parse the variables of trl_hotfix. Only the standard library is imported: this is loaded at interpreter start."""

import os
import sys

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
STRICT = "strict"
OBSERVE = "observe"


def switch(value: str) -> str | None:
    """Return ``"on"``, ``"off"``, ``"strict"`` or ``"observe"`` for a value of ``TRL_HOTFIX``, or None if invalid."""
    value = value.strip().lower()
    if value in ON:
        return "on"
    if value in OFF:
        return "off"
    return value if value in (STRICT, OBSERVE) else None


def warn(message: str) -> None:
    """Print one line on standard error. ``logging`` and ``warnings`` take too long to load at interpreter start."""
    from contextlib import suppress

    # Standard error may be closed or full, or may not accept every character. That must not end the user's import.
    text = message.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"trl_hotfix: WARNING: {text}", file=sys.stderr, flush=True)


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
