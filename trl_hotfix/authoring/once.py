"""What is done once for each trainer: a warning above all."""

from __future__ import annotations

import logging
from typing import Any

from ..by_identity import ByIdentity

_log = logging.getLogger("trl_hotfix")


class Once:
    """A question about trainers, which are held weakly: is this the first time?"""

    def __init__(self) -> None:
        self._asked: ByIdentity[bool] = ByIdentity()

    def __call__(self, trainer: Any) -> bool:
        """Return whether this was not asked about ``trainer`` yet. A copy of a trainer is another one."""
        is_first = self._asked.get(trainer) is None
        self._asked[trainer] = True
        return is_first


class WarnOnce:
    """A warning in the log of trl_hotfix, once for each trainer. A patch makes one for each of its warnings."""

    def __init__(self) -> None:
        self._is_first = Once()

    def __call__(self, trainer: Any, message: str, *arguments: object) -> None:
        """Log ``message % arguments`` if this trainer has not had this warning yet."""
        if self._is_first(trainer):
            _log.warning(message, *arguments)
