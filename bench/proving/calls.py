"""Record which functions of TRL a run calls, and the classes of TRL whose attributes it can see."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any


@contextmanager
def recorded(calls: set[str]) -> Iterator[None]:
    """Add ``module:function`` and ``module:Class`` to ``calls`` for each call of this thread within the block.

    ``testing.default_arguments`` reads the fields of a configuration class without a call: its class counts as called.
    """
    trl = sys.modules.get("trl")
    # Not resolved: Python names a file by the path that it was found on, which may lead through a link.
    folder = f"{Path(str(trl.__file__)).absolute().parent}/" if trl is not None else ""
    names: dict[CodeType, str | None] = {}
    classes: set[type] = set()

    def name_of(code: CodeType) -> str | None:
        if not code.co_filename.startswith(folder):
            return "default_arguments" if code.co_name == "default_arguments" else None
        module = code.co_filename.removeprefix(folder).removesuffix(".py").replace("/", ".")
        # Python 3.10 has no qualified names: the name of a method then stands for its module.
        name: str = getattr(code, "co_qualname", code.co_name)
        return f"trl.{module}:{name.partition('.<locals>')[0]}".replace(".__init__:", ":")

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        code = frame.f_code
        if code not in names:
            names[code] = name_of(code)
        name = names[code]
        if name == "default_arguments":
            classes.update(getattr(frame.f_locals.get("config_class"), "__mro__", ()))
        elif name is not None:
            calls.add(name)
            classes.update(type(frame.f_locals.get("self")).__mro__)

    before = sys.getprofile()
    sys.setprofile(note if folder else before)
    try:
        yield
    finally:
        sys.setprofile(before)
        of_trl = (cls for cls in classes if f"{cls.__module__}.".startswith("trl."))
        calls.update(f"{cls.__module__}:{cls.__qualname__}" for cls in of_trl)
