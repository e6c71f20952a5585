"""Modules in this folder import their neighbours by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def sources() -> None:
    """Lay out the code of every release, and the stacks of the oldest, a middle and the newest release."""
    from bench.releases import layout

    layout.build([layout.main_place(release) for release in ("0.11.4", "0.16.1", layout.releases()[-1])])
    layout.build_release_overlays(Path(sys.executable))
