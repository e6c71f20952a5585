"""Repairs the TRL that is installed, at run time, with proof.

    import trl_hotfix; trl_hotfix.apply()

It imports nothing: Python loads this package at its start when ``TRL_HOTFIX`` is set, while ``sys.path`` is
still incomplete. The names below load what they need when they are first used.

Rooms: ``commands``, ``checking``, ``scanning``, ``recording``, ``verification``, ``relations``, ``patching``,
``reporting``, ``matching``, ``selection``, ``catalogue``, ``patches``, ``testing``, ``authoring``; each names its
modules. On the ground, beneath all of them: ``model`` has the types that rooms share, ``errors`` the errors,
``settings`` parses the variables, ``log`` writes on standard error (``standard_error``), ``call`` is what a wrapper
gets, ``witness`` counts the calls, ``by_identity`` holds trainers weakly, ``import_hooks`` wait for modules,
``signal_handlers`` tells apart whose exception it is, ``stopping`` ends an import with a message, ``regular_files``
reads a user's file. ``api`` has the public functions, ``autostart`` starts them with the interpreter, ``__main__`` is
the command line.
"""

TYPE_CHECKING = False  # type checkers know the name; `typing` would cost 3 ms at every interpreter start
if TYPE_CHECKING:
    from .api import apply as apply
    from .api import explain as explain
    from .api import patched as patched
    from .api import revert as revert
    from .api import status as status
    from .errors import CatalogueError as CatalogueError
    from .errors import HotfixError as HotfixError
    from .errors import NotAppliedError as NotAppliedError
    from .errors import PackError as PackError
    from .errors import SettingError as SettingError
    from .errors import UnknownPatchError as UnknownPatchError
    from .recording.callback import HotfixCallback as HotfixCallback
    from .reporting.report import Report as Report

__version__ = "0.2.0"

# msgspec and the data files need a folder. Without this the first use would fail on whichever of them comes first.
if type(getattr(__spec__, "loader", None)).__name__ == "zipimporter":
    raise ImportError(
        f"trl_hotfix cannot run from a zip file, and this is one: {__file__}. Install it into the environment that has "
        "TRL, or use pex or shiv, which unpack their packages."
    )

_HOME = {
    "apply": "api",
    "explain": "api",
    "patched": "api",
    "revert": "api",
    "HotfixCallback": "recording.callback",
    "status": "api",
    "CatalogueError": "errors",
    "HotfixError": "errors",
    "NotAppliedError": "errors",
    "PackError": "errors",
    "SettingError": "errors",
    "UnknownPatchError": "errors",
    "Report": "reporting.report",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    from .patching.collector import paused

    with paused():
        value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
