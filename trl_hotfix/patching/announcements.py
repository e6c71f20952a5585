"""One line in the log for each trainer that a program imports: how many repairs are on for it, and their digest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType

from ..log import event, level_of_repairs, log
from ..reporting.report import Report
from . import phases, reach
from .module_patch import ModulePatch


class Announcements:
    """The modules whose trainers are due for a line, and the lines that the log has. An engine has one.

    A trainer has a second line only if ``apply()`` has changed its repairs.
    """

    def __init__(self) -> None:
        self._due: list[ModuleType] = []
        self._made: set[str] = set()

    def add(self, module: ModuleType) -> None:
        self._due.append(module)

    def make(self, module_patches: Sequence[ModulePatch], report: Callable[[], Report]) -> None:
        """Log a line for each trainer that is due and has repairs."""
        due, self._due = self._due, []
        trainers = [cls for module in due for cls in phases.trainers_of(module) if reach.is_trls_own(cls)]
        patches_of = {cls.__name__: reach.concerning_class(module_patches, cls) for cls in trainers}
        if log.isEnabledFor(level_of_repairs()) and any(patches_of.values()):
            state = report()
            for name, ids in patches_of.items():
                self._log(name.removesuffix("Trainer"), sorted(ids), state)

    def _log(self, trainer: str, ids: list[str], report: Report) -> None:
        number, fields = len(ids), {"trainer": trainer, "trl": report.trl, "patches": ids}
        if report.observe:
            bugs = "1 known bug" if number == 1 else f"{number} known bugs"
            line, extra = f"observing {bugs} of {trainer}, repairing nothing", event("observing", **fields)
        else:
            repairs = "1 repair" if number == 1 else f"{number} repairs"
            line = f"{repairs} on for {trainer}, digest {report.digest}"
            extra = event("repairs-on", **fields, digest=report.digest)
        if ids and line not in self._made:
            self._made.add(line)
            log.log(level_of_repairs(), "%s", line, extra=extra)
