"""What one run of the user's script changes, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

ALL = "all"


class CannotBeAskedError(Exception):
    """We cannot ask a relation of this run. ``args`` has the reason."""


@dataclass(frozen=True)
class Variant:
    """One run. The defaults are the user's run, cut to a size for a CPU.

    ``batch_size`` and ``accumulation`` share the rows of a step; 0 leaves them as the run has them. ``wider``: each
    batch is collated beside a longer row, or padded to a multiple of ``width``. ``reversed``: the rows of a step come
    in the opposite order. ``generation``: one generation serves so many steps. ``equal_lengths``: all answers have
    one length. ``evaluates`` on each step. ``drawn``:
    random numbers are drawn before the first step.

    ``of_trl``: TRL's own class trains in place of the user's. ``without``: arguments of the user's for which TRL's
    defaults stand, such as ``data_collator``. ``methods``: methods of the user's class for which TRL's stand.
    ``patches``: ids of patches that are on, or ``("all",)``.

    ``stand_ins``: reward functions, by number, that a stand-in replaces. ``traced``: the run notes what each module
    computes in the first step.
    """

    batch_size: int = 0
    accumulation: int = 0
    wider: bool = False
    width: int = 0
    reversed: bool = False
    generation: int = 0
    equal_lengths: bool = False
    evaluates: bool = False
    drawn: bool = False
    of_trl: bool = False
    without: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    patches: tuple[str, ...] = ()
    stand_ins: tuple[int, ...] = ()
    traced: bool = False

    def but(self, **changes: Any) -> Variant:
        return replace(self, **changes)

    def __str__(self) -> str:
        """Return what a reader needs to know of it."""
        words = [f"{self.batch_size}x{self.accumulation}"] if self.batch_size else []
        words += [
            text
            for text, is_so in (
                ("beside a longer row", self.wider),
                (f"padded to multiples of {self.width}", self.width > 0),
                ("rows reversed", self.reversed),
                (f"one generation for {self.generation} steps", self.generation > 0),
                ("with evaluation", self.evaluates),
            )
            if is_so
        ]
        return ", ".join(words) or "the run"
