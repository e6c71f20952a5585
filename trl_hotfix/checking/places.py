"""Where two runs part first: a column of the batches, a module, the loss, or a gradient."""

from __future__ import annotations

from ..relations.tolerance import tolerance
from .forks import Outcome


def first_parting(left: Outcome, right: Outcome) -> str:
    """Return where two runs part first in the first step, in words."""
    import torch

    if left.error or right.error:
        return f"it cannot be traced: {left.error or right.error}"
    if not left.trace or not right.trace:
        return ""
    allowed = tolerance(torch.float32)
    ours, others = left.trace["columns"], right.trace["columns"]
    for name in dict.fromkeys([*ours, *others]):
        if ours.get(name) != others.get(name):
            return f"the column {name!r} of the batches"
    one, other = left.trace["modules"], right.trace["modules"]
    for name in one:
        if name in other and abs(one[name] - other[name]) > allowed * max(abs(one[name]), abs(other[name])):
            return f"the module {name}"
    gradients = left.run.gradients[0], right.run.gradients[0]
    scale = max(float(value.abs().max()) for side in gradients for value in side.values())
    # A backward pass begins with what a forward pass computes last.
    for name in reversed(list(gradients[0])):
        if name not in gradients[1]:
            return f"{name} has a gradient in one of them"
        if float((gradients[0][name] - gradients[1][name]).abs().max()) > allowed * scale:
            modules = ", since the columns and modules agree" if one else ""
            return f"the loss{modules}: the first gradient that differs is of {name}"
    return "a later step"
