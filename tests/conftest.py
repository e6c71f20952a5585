from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from trl_hotfix.catalogue import condensed

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to break; on the path, it shadows the installed one."""
    copy = tmp_path / "trl_hotfix"
    shutil.copytree(CHECKOUT / "trl_hotfix", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "patches.yaml", copy)
    # What the build of a wheel makes of the evidence.
    evidence = condensed.read(CHECKOUT / "evidence")
    for name, content in condensed.condensed(evidence).items():
        (copy / "data" / name).write_text(json.dumps(content))
    return copy
