"""What ``TRL_HOTFIX=1`` runs at interpreter start, through ``trl_hotfix_autoapply.pth``.

It runs in every Python process of the environment, twice in a virtual environment up to Python 3.14, and while
``sys.path`` is incomplete. So it imports the standard library only, is idempotent and never raises: all it does is wait
for somebody to import ``trl``. Annotations stand in quotes here, as ``__future__`` would be one more module to load.
"""

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType

ON = ("1", "true", "yes", "on")
OFF = ("", "0", "false", "no", "off")
STRICT = "strict"

_started = False


def switch(value: str) -> str | None:
    """``TRL_HOTFIX`` as ``"on"``, ``"off"`` or ``"strict"``; None for a value that means nothing."""
    value = value.strip().lower()
    if value in ON:
        return "on"
    if value in OFF:
        return "off"
    return STRICT if value == STRICT else None


def start() -> None:
    """Wait for ``trl`` if ``TRL_HOTFIX`` says so."""
    global _started
    if _started:
        return
    _started = True
    value = os.environ.get("TRL_HOTFIX", "")
    wanted = switch(value)
    if wanted is None:
        warn(f"TRL_HOTFIX={value!r} is not one of 1, true, yes, on, strict, 0, false, no, off; taken as off")
    elif wanted != "off":
        try:
            from .import_hooks import FINDER
        except ImportError as error:
            warn(f"the installation is damaged ({error}); nothing is patched. Install trl_hotfix again")
        else:
            FINDER.before_import("trl", apply_now)


def apply_now() -> None:
    """Read the catalogue and arm its patches: somebody is about to import TRL.

    Errors leave TRL unpatched with one warning, except in strict mode.
    """
    try:
        from .engine import apply
        from .import_hooks import FINDER

        apply()
        value = os.environ.get("TRL_HOTFIX_CALLBACK", "1")
        if switch(value) is None:
            warn(f"TRL_HOTFIX_CALLBACK={value!r} is neither on nor off; taken as on")
        if switch(value) != "off":
            FINDER.when_imported("transformers.trainer", _give_callback)
    # The first border, the import hook: whatever fails here must not end the user's import of TRL.
    except Exception as error:
        if switch(os.environ.get("TRL_HOTFIX", "")) == STRICT:
            raise
        warn(f"TRL stays unpatched: {type(error).__name__}: {error}")


def _give_callback(module: "ModuleType") -> None:
    try:
        from .callback import add_to_every_trainer

        add_to_every_trainer(module)
    # The first border again: transformers is being imported.
    except Exception as error:
        warn(f"runs will have no record of what is patched: {type(error).__name__}: {error}")


def warn(message: str) -> None:
    """One line on standard error. ``logging`` and ``warnings`` are not for interpreter start."""
    from contextlib import suppress

    # Standard error may be closed or full, and may not take every character: no reason to end the user's import.
    text = message.encode("ascii", "backslashreplace").decode()
    with suppress(OSError, ValueError):
        if sys.stderr is not None:
            print(f"trl_hotfix: WARNING: {text}", file=sys.stderr, flush=True)


def hook_problem() -> str | None:
    """Why ``TRL_HOTFIX=1`` cannot work in this interpreter as it was started, or None if it can."""
    import site

    if sys.flags.no_site:
        return "Python runs with -S, which skips every .pth file"
    if sys.flags.ignore_environment:
        return f"Python runs with {'-I' if sys.flags.isolated else '-E'}, which ignores environment variables"
    # site lists no user directory while it is disabled, and reads none then.
    folders = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
    if not any(os.path.isfile(os.path.join(folder, "trl_hotfix_autoapply.pth")) for folder in folders):
        return (
            "trl_hotfix_autoapply.pth is in no site directory of this Python (pip --target and PYTHONPATH do not "
            "make one); install trl_hotfix into this environment"
        )
    return None
