"""The bench as a library: what lies in this folder imports its neighbours by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def everywhere() -> None:
    """Every release, laid out."""
    import layout

    layout.build(layout.places())
