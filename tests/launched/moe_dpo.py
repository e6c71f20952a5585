"""Run ``train_moe_dpo.py`` in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from launched import LAUNCHED, TESTS

SCRIPT = LAUNCHED / "train_moe_dpo.py"


def free_port() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def train(out: Path, *arguments: str, hotfix: str) -> dict[str, Any]:
    """Return the result of the run with its standard error as ``["stderr"]``. ``hotfix`` is the value of TRL_HOTFIX."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    process = subprocess.run(
        [sys.executable, str(SCRIPT), str(out), *arguments],
        env={**environment, "TRL_HOTFIX": hotfix, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode != 0:
        raise RuntimeError(f"{SCRIPT.name} {' '.join(arguments)} ended with {process.returncode}:\n{process.stderr}")
    for line in process.stderr.splitlines():
        if line.startswith("trl_hotfix"):
            print(line, file=sys.stderr)
    return {**json.loads(out.read_text()), "stderr": process.stderr}
