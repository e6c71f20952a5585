"""Where two runs disagree, in what a variant leaves comparable."""

from __future__ import annotations

from dataclasses import replace

from ..relations import compare
from ..relations.compare import Difference
from .forks import Outcome
from .variant import Variant


def differences(left: Outcome, right: Outcome, variant: Variant, of: frozenset[str]) -> list[Difference]:
    """Return where the run of a variant is not the other one.

    A generation that serves several steps has the rows of the first step alone in common with one that serves one.
    """
    one, other = left.run, right.run
    if variant.generation:
        of = of & {"gradients"}
        one, other = (replace(each, gradients=each.gradients[:1]) for each in (one, other))
    return list(compare.differences(one, other, of))
