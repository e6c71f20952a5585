"""Modules in this folder import their neighbours by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def everywhere() -> None:
    """Lay out every release."""
    import layout

    layout.build(layout.places())
