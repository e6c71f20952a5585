"""Check in a fresh Python that ``TRL_HOTFIX=1`` works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ... import settings
from ...catalogue.data_files import PACKAGE
from ...errors import plain
from .answer import Hook, Problems

SECONDS = 120.0
"""The time limit for the start of a fresh Python, which may be slow on a disk that a hundred nodes use at once."""


_LOOK = """
import json, sys
hooks = sys.modules.get("trl_hotfix.import_hooks")
effective = hooks is not None and hooks.FINDER.waits_for("trl")
known = ("_frozen_importlib", "_frozen_importlib_external", "trl_hotfix.import_hooks")
classes = [finder if isinstance(finder, type) else type(finder) for finder in sys.meta_path]
foreign = [f"{cls.__module__}.{cls.__qualname__}" for cls in classes if cls.__module__ not in known]
package = sys.modules.get("trl_hotfix")
print(json.dumps({"effective": effective, "finders": foreign, "file": getattr(package, "__file__", None)}))
"""


def start_hook(problems: Problems) -> tuple[Hook, list[str]]:
    """Return whether TRL_HOTFIX=1 works in a fresh Python, and the foreign finders on ``sys.meta_path`` there."""
    problem = settings.hook_problem()
    if problem is not None:
        problems.add(
            f"TRL_HOTFIX=1 does nothing here: {problem}", "mend that, or call trl_hotfix.apply() in the script"
        )
    result, messages = _in_a_fresh_python()
    file = result.get("file")
    folder = str(Path(file).parent) if file else None
    effective = bool(result.get("effective"))
    if not effective and problem is None:
        reasons = "".join(f"; it said: {message}" for message in messages)
        problems.add(
            f"a fresh Python with TRL_HOTFIX=1 does not wait for TRL{reasons}",
            f"install trl_hotfix again into the environment of {sys.executable}, or call trl_hotfix.apply()",
        )
    if folder is not None and not (Path(folder).is_dir() and PACKAGE.samefile(folder)):
        problems.add(
            f"a fresh Python takes trl_hotfix from {folder}; this one is {PACKAGE}",
            "one of the two is on the path by mistake: look at PYTHONPATH, the working folder, and for two installs",
        )
    hook = Hook(problem=problem, effective=effective, folder=folder, said=messages)
    return hook, list(result.get("finders", ()))


def _in_a_fresh_python() -> tuple[Mapping[str, Any], list[str]]:
    """Return the output of ``_LOOK`` in a fresh Python, and the lines about trl_hotfix on its standard error."""
    environment = {**os.environ, "TRL_HOTFIX": "1"}
    try:
        process = subprocess.run(
            # With the options of this Python, such as -S, so that the answer is about such a one.
            [sys.executable, *subprocess._args_from_interpreter_flags(), "-c", _LOOK],  # type: ignore[attr-defined]
            env=environment,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, [f"{type(error).__name__}: {plain(str(error))}"]
    # It leaves out the lines of other programs on standard error, since they may hold private data.
    messages = [plain(line) for line in process.stderr.splitlines() if line.startswith("trl_hotfix")]
    try:
        # Other output at the start of Python comes before the last line.
        result = json.loads((process.stdout.splitlines() or [""])[-1])
    except ValueError:
        return {}, [*messages, f"no answer, exit code {process.returncode}"]
    return result, messages
