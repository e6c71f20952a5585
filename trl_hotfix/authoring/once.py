"""What is done once for each trainer: a warning above all."""

from __future__ import annotations

from typing import Any

from ..by_identity import ByIdentity


class Once:
    """A question about trainers, which are held weakly: is this the first time?"""

    def __init__(self) -> None:
        self._asked: ByIdentity[bool] = ByIdentity()

    def __call__(self, trainer: Any) -> bool:
        """Return whether this was not asked about ``trainer`` yet. A copy of a trainer is another one."""
        is_first = self._asked.get(trainer) is None
        self._asked[trainer] = True
        return is_first
