"""``compute_accuracy`` counts a pair whose answers have equal rewards as right."""

from __future__ import annotations

from types import ModuleType

from trl_hotfix.authoring import Call, absent, judge, wrapper
from trl_hotfix.model import Outcome


@wrapper
def leave_out_ties(call: Call) -> object:
    rewards, labels = call["eval_pred"]
    differ = rewards[:, 0] != rewards[:, 1]
    if differ.all():
        return call()
    return call.with_(eval_pred=(rewards[differ], labels[differ]))()


def counts_ties(leaf: ModuleType) -> Outcome:
    """Four pairs: one is right, one is wrong, and two are ties."""
    import numpy

    if not hasattr(leaf, "compute_accuracy"):
        return absent("this TRL has no compute_accuracy here")
    rewards = numpy.array([[2.0, 1.0], [1.0, 2.0], [1.0, 1.0], [3.0, 3.0]])
    accuracy = leaf.compute_accuracy((rewards, numpy.zeros(4)))["accuracy"]
    return judge(accuracy, right=1 / 2, wrong=3 / 4)
