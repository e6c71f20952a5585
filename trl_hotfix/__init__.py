"""Repairs the TRL that is installed, at run time, with proof.

    import trl_hotfix; trl_hotfix.apply()

Nothing is imported here: this package is loaded at interpreter start when ``TRL_HOTFIX`` is set, while ``sys.path`` is
still incomplete. The names below load what they need when they are first used.
"""

TYPE_CHECKING = False  # type checkers know the name; `typing` would cost 3 ms at every interpreter start
if TYPE_CHECKING:
    from .errors import CatalogueError as CatalogueError
    from .errors import HotfixError as HotfixError
    from .errors import NotAppliedError as NotAppliedError
    from .errors import PackError as PackError
    from .errors import SettingError as SettingError
    from .errors import UnknownPatchError as UnknownPatchError
    from .patching.api import apply as apply
    from .patching.api import explain as explain
    from .patching.api import patched as patched
    from .patching.api import revert as revert
    from .patching.api import status as status
    from .recording.callback import HotfixCallback as HotfixCallback
    from .reporting.report import Report as Report

__version__ = "0.2.0"

_HOME = {
    "apply": "patching.api",
    "explain": "patching.api",
    "patched": "patching.api",
    "revert": "patching.api",
    "HotfixCallback": "recording.callback",
    "status": "patching.api",
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

    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
