"""Read ``training_args.bin`` without running it: a pickle names classes and functions, and none of them is looked up.

Instead of each there is a class that does nothing, whose objects keep what they are given.
"""

from __future__ import annotations

import functools
import io
import pickle
import pickletools
import zipfile
from pathlib import Path
from typing import Any

from ..errors import ScriptError, plain, reason
from . import told_files

LARGEST = 1 << 18
"""The largest size in bytes of the file and of its pickle; the arguments of a training have some kilobytes."""

_MOST_CLASSES = 1_000
_EXPECTED = "the training_args.bin that transformers saves beside a model"

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
        return _inert_class(str(module), str(name))

    def persistent_load(self, pid: Any) -> Any:
        return None


@functools.lru_cache(maxsize=_MOST_CLASSES)
def _inert_class(module: str, name: str) -> type[Inert]:
    return type(name, (Inert,), {"made_by": f"{module}.{name}"})


def read_arguments(path: Path) -> Inert:
    """Return the arguments of a training as an inert object. Raises ``ScriptError``."""
    content = told_files.read(path, LARGEST, _EXPECTED)
    try:
        loaded = _load(_pickle_in(content))
    # A damaged pickle or archive raises nearly anything.
    except Exception as error:  # noqa: BLE001
        found = reason(error)
    else:
        if isinstance(loaded, Inert):
            return loaded
        found = f"it is a {type(loaded).__name__}"
    raise ScriptError(f"{plain(str(path))} has no arguments of a training: {found}; expected {_EXPECTED}")


def _load(content: bytes) -> Any:
    stream = io.BytesIO(content)
    loaded: Any = None
    for _ in range(_LEGACY_OBJECTS):
        start = stream.tell()
        _check(stream)
        stream.seek(start)
        loaded = _InertUnpickler(stream).load()
        if isinstance(loaded, Inert):
            break
    return loaded


def _check(stream: io.BytesIO) -> None:
    """Raise ``ValueError`` for a pickle that is damaged, or that asks for more memory than it has bytes.

    The unpickler makes room for as many objects as the largest number of one that is kept, which may be any.
    """
    try:
        for opcode, argument, _ in pickletools.genops(stream):
            if opcode.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > LARGEST:
                raise ValueError(f"it keeps an object as number {argument}")
    # What is no pickle has a byte that is no opcode, or a text where there is a number.
    except (ValueError, LookupError) as error:
        raise ValueError(f"it is no pickle, or a damaged one ({reason(error)})") from None


def _pickle_in(content: bytes) -> bytes:
    if not zipfile.is_zipfile(io.BytesIO(content)):
        return content
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        name = next((name for name in archive.namelist() if name.rpartition("/")[2] == "data.pkl"), None)
        if name is None:
            raise ValueError("the archive has no data.pkl")
        if archive.getinfo(name).file_size > LARGEST:
            raise ValueError(f"it has more than {LARGEST >> 10} KiB")
        return archive.read(name)
