"""Whether ``TRL_HOTFIX=1`` works, as seen in a fresh Python."""

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
"""For a fresh Python to start: on a slow disk, with a hundred nodes that start too."""


_LOOK = """
import json, sys
ours = [each for each in sys.meta_path if type(each).__module__ == "trl_hotfix.import_hooks"]
own = ("_frozen_importlib", "_frozen_importlib_external", "trl_hotfix.import_hooks")
kinds = [each if isinstance(each, type) else type(each) for each in sys.meta_path]
others = [f"{kind.__module__}.{kind.__qualname__}" for kind in kinds if kind.__module__ not in own]
package = sys.modules.get("trl_hotfix")
print(json.dumps({"effective": bool(ours), "finders": others, "file": getattr(package, "__file__", None)}))
"""


def start_hook(problems: Problems) -> tuple[Hook, list[str]]:
    """Whether TRL_HOTFIX=1 works, seen in a fresh Python; and whose finders are on ``sys.meta_path`` there."""
    problem = settings.hook_problem()
    if problem is not None:
        problems.add(
            f"TRL_HOTFIX=1 does nothing here: {problem}", "mend that, or call trl_hotfix.apply() in the script"
        )
    seen, said = _in_a_fresh_python()
    file = seen.get("file")
    folder = str(Path(file).parent) if file else None
    effective = bool(seen.get("effective"))
    if not effective and problem is None:
        problems.add(
            "a fresh Python with TRL_HOTFIX=1 does not wait for TRL" + "".join(f"; it said: {each}" for each in said),
            f"install trl_hotfix again into the environment of {sys.executable}, or call trl_hotfix.apply()",
        )
    here = PACKAGE
    if folder is not None and not (Path(folder).is_dir() and here.samefile(folder)):
        problems.add(
            f"a fresh Python takes trl_hotfix from {folder}; this one is {here}",
            "one of the two is on the path by mistake: look at PYTHONPATH, the working folder, and for two installs",
        )
    return Hook(problem=problem, effective=effective, folder=folder, said=said), list(seen.get("finders", ()))


def _in_a_fresh_python() -> tuple[Mapping[str, Any], list[str]]:
    """What a fresh Python sees, and what it says of trl_hotfix on standard error."""
    environment = {**os.environ, "TRL_HOTFIX": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK],
            env=environment,
            capture_output=True,
            text=True,
            errors="backslashreplace",
            timeout=SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, [f"{type(error).__name__}: {plain(str(error))}"]
    # Of others' words on standard error nobody knows what is in them.
    said = [plain(line) for line in done.stderr.splitlines() if line.startswith("trl_hotfix")]
    try:
        # What else prints at the start of Python comes before.
        seen = json.loads((done.stdout.splitlines() or [""])[-1])
    except ValueError:
        return {}, [*said, f"no answer, exit code {done.returncode}"]
    return seen, said
