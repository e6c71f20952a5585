"""Scripts that tests launch: trainings on one rank and on several, processes of every kind, and their environments.

``LAUNCHED`` is their folder. A script that makes a tiny model needs ``TESTS`` on its path.
"""

from __future__ import annotations

from pathlib import Path

LAUNCHED = Path(__file__).parent
TESTS = LAUNCHED.parent
