"""Start trl_hotfix at interpreter start, through ``trl_hotfix_autoapply.pth``. No other module imports this one.

It runs in every Python process of the environment, twice in a virtual environment up to Python 3.14, and while
``sys.path`` is incomplete. So it imports the standard library only, is idempotent and never raises, and it only waits
for an import of ``trl``. Annotations are quoted here, since ``__future__`` would be one more module to load.
"""

import os

from .settings import STRICT_LEVELS, callback_is_on, misspelt, switch, warn

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType


_started = False


def start() -> None:
    """Wait for the import of ``trl``, unless ``TRL_HOTFIX`` is off.

    A value that we do not understand waits too: it stops that import, and no process without TRL.
    """
    global _started
    if _started:
        return
    _started = True
    if switch(os.environ.get("TRL_HOTFIX", "")) == "off":
        return
    try:
        from .import_hooks import FINDER
    except ImportError as error:
        warn(f"the installation is damaged ({error}); TRL stays unpatched. Install trl_hotfix again", "damaged")
    else:
        FINDER.before_import("trl", apply_now)


def apply_now() -> None:
    """Read the catalogue and wait for the modules of its targets. It runs when the program is about to import TRL.

    A setting that is not understood stops the import, in every mode. An error of ours, such as a damaged installation,
    leaves TRL unpatched with one warning, except in strict mode.
    """
    try:
        from .import_hooks import FINDER
        from .patching.collector import paused

        with paused():
            from .api import apply
        for name, meant in misspelt():
            warn(f"{name} is no variable of trl_hotfix and does nothing; did you mean {meant}?", "unknown-variable")
        add_callback = callback_is_on()
        apply()
        # Under strict apply() waits for it already, and a trainer that gets no callback is an error there.
        if add_callback and not FINDER.waits_for("transformers.trainer"):
            FINDER.when_imported("transformers.trainer", _add_callback)
    # An error here must not end the user's import of TRL.
    except Exception as error:
        if getattr(error, "stops_import", False):
            from .stopping import stopped

            stopped(error)
            raise
        if switch(os.environ.get("TRL_HOTFIX", "")) in STRICT_LEVELS:
            raise
        warn(f"TRL stays unpatched: {type(error).__name__}: {error}", "unpatched")


def _add_callback(module: "ModuleType") -> None:
    try:
        from .recording.callback import add_to_every_trainer

        add_to_every_trainer(module)
    # An error here must not end the user's import of transformers.
    except Exception as error:
        warn(f"runs will have no record of their repairs: {type(error).__name__}: {error}", "no-record")
