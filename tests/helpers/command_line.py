"""Run ``trl-hotfix`` in a process of its own."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from click.testing import CliRunner

CHECKOUT = Path(__file__).parents[2]
ID = "moe-aux-loss-lost-under-deepspeed"


def runner() -> CliRunner:
    """Return a runner that keeps standard error apart. Before click 8.2 that has to be asked for."""
    separate: Any = {"mix_stderr": False} if "mix_stderr" in inspect.signature(CliRunner).parameters else {}
    return CliRunner(**separate)


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    command = [sys.executable, "-m", "trl_hotfix", *arguments]
    # `python -m` puts the working folder first on the path. The checkout would hide the copy that a test has broken.
    cwd = CHECKOUT / "tests"
    return subprocess.run(command, env={**kept, **variables}, cwd=cwd, capture_output=True, text=True, check=False)


def without_trl(root: Path, version: str | None) -> str:
    """Return a folder for PYTHONPATH in which TRL has this version, or is not installed."""
    if version is None:
        hidden = root / "sitecustomize.py"
        hidden.write_text(
            "import importlib.metadata as m\nreal = m.distribution\n"
            "def distribution(name):\n    if name == 'trl': raise m.PackageNotFoundError(name)\n    return real(name)\n"
            "m.distribution = distribution\n"
        )
    else:
        folder = root / f"trl-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    return str(root)
