"""Modules in this folder and in ``tests/bench`` import their neighbours by name."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
# `plugin` is loaded by name too, in the process of a release only.
sys.path[:0] = [str(HERE), str(HERE.parent / "bench")]
