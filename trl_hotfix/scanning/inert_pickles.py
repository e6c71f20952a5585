"""Read ``training_args.bin`` without running it: a pickle names classes and functions, and none of them is looked up.

Instead of each there is a class that does nothing, whose objects keep what they are given.
"""

from __future__ import annotations

import io
import pickle
import zipfile
from pathlib import Path
from typing import Any

from ..errors import ScriptError, plain

LARGEST = 1 << 24
"""The largest size in bytes of a pickle that is read; the arguments of a training have some kilobytes."""

_LEGACY_OBJECTS = 4
"""Before torch 1.6 a file had a magic number, a version and the system's sizes before the object."""


class Inert(dict):  # type: ignore[type-arg]
    """An object of a class that was not looked up. ``given`` is what it was made with, ``state`` what was set on it."""

    made_by = ""

    given: tuple[Any, ...]
    state: dict[str, Any]

    def __new__(cls, *given: Any, **named: Any) -> Inert:
        # A pickle calls `__new__`, and often no `__init__`.
        made = super().__new__(cls)
        made.given, made.state = given, dict(named)
        return made

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__()

    def __setstate__(self, state: Any) -> None:
        parts = state if isinstance(state, tuple) else (state,)
        for part in parts:
            if isinstance(part, dict):
                self.state.update(part)

    def append(self, item: Any) -> None:
        self.setdefault("items", []).append(item)

    def extend(self, items: Any) -> None:
        self.setdefault("items", []).extend(items)

    def __hash__(self) -> int:  # type: ignore[override]
        return id(self)

    def __call__(self, *given: Any, **named: Any) -> Inert:
        return self


class _InertUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in (("copyreg", "_reconstructor"), ("copy_reg", "_reconstructor")):
            return lambda cls, *rest: cls()
        return type(str(name), (Inert,), {"made_by": f"{module}.{name}"})

    def persistent_load(self, pid: Any) -> Any:
        return None


def read_arguments(path: Path) -> Inert:
    """Return the arguments of a training as an inert object. Raises ``ScriptError``."""
    file = plain(str(path))
    try:
        content = _content(path)
        stream = io.BytesIO(content)
        loaded: Any = None
        for _ in range(_LEGACY_OBJECTS):
            loaded = _InertUnpickler(stream).load()
            if isinstance(loaded, Inert):
                return loaded
    except OSError as error:
        raise ScriptError(f"{file} cannot be read: {error.strerror or error}") from None
    # A damaged pickle raises nearly anything.
    except Exception as error:  # noqa: BLE001
        reason = plain(str(error)) or type(error).__name__
        raise ScriptError(f"{file} has no arguments of a training: {reason}") from None
    raise ScriptError(f"{file} has no arguments of a training: it is a {type(loaded).__name__}")


def _content(path: Path) -> bytes:
    if not zipfile.is_zipfile(path):
        if path.stat().st_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        return path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        name = next((name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"), None)
        if name is None:
            raise ValueError("the archive has no data.pkl")
        if archive.getinfo(name).file_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 20} MiB")
        return archive.read(name)
