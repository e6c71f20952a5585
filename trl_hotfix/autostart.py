"""Start trl_hotfix at interpreter start, through ``trl_hotfix_autoapply.pth``. No other module imports this one.

It runs in every Python process of the environment, twice in a virtual environment up to Python 3.14, and while
``sys.path`` is incomplete. So it imports the standard library only, is idempotent and never raises, and it only waits
for an import of ``trl``. Annotations are quoted here, since ``__future__`` would be one more module to load.
"""

import os

from .settings import STRICT, switch, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


_started = False


def start() -> None:
    """Wait for the import of ``trl`` if ``TRL_HOTFIX`` is on, strict or observe."""
    global _started
    if _started:
        return
    _started = True
    value = os.environ.get("TRL_HOTFIX", "")
    setting = switch(value)
    if setting is None:
        known = "1, true, yes, on, strict, observe, 0, false, no, off"
        warn(f"TRL_HOTFIX={value[:80]!r} is not one of {known}; taken as off")
    elif setting != "off":
        try:
            from .import_hooks import FINDER
        except ImportError as error:
            warn(f"the installation is damaged ({error}); nothing is patched. Install trl_hotfix again")
        else:
            FINDER.before_import("trl", apply_now)


def apply_now() -> None:
    """Read the catalogue and wait for the modules of its targets. It is called when TRL is about to be imported.

    An error leaves TRL unpatched with one warning, except in strict mode.
    """
    try:
        from .import_hooks import FINDER
        from .patching.api import apply

        apply()
        value = os.environ.get("TRL_HOTFIX_CALLBACK", "1")
        if switch(value) is None:
            warn(f"TRL_HOTFIX_CALLBACK={value[:80]!r} is neither on nor off; taken as on")
        if switch(value) != "off":
            FINDER.when_imported("transformers.trainer", _add_callback)
    # An error here must not end the user's import of TRL.
    except Exception as error:
        if switch(os.environ.get("TRL_HOTFIX", "")) == STRICT:
            raise
        warn(f"TRL stays unpatched: {type(error).__name__}: {error}")


def _add_callback(module: "ModuleType") -> None:
    try:
        from .recording.callback import add_to_every_trainer

        add_to_every_trainer(module)
    # An error here must not end the user's import of transformers.
    except Exception as error:
        warn(f"runs will have no record of what is patched: {type(error).__name__}: {error}")
