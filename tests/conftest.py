from __future__ import annotations

import shutil
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to break; on the path, it shadows the installed one."""
    copy = tmp_path / "trl_hotfix"
    shutil.copytree(CHECKOUT / "trl_hotfix", copy, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(CHECKOUT / "patches.yaml", copy)
    return copy
