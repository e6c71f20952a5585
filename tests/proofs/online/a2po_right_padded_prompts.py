"""Train two steps of two micro-batches, and evaluate, with the real A2POTrainer and a tokenizer that pads on the right.

Losses and gradients are compared with those of the formula, a sequence at a time: on prompts without padding, and on
prompts with padding between them and their completions.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny.a2po_runs import PROMPTS, A2poRun, padded_on_the_right, unpadded

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the view of a view asks for the same side"}

ID = "a2po-right-padded-prompts"


def _run(side: str, **settings: Any) -> A2poRun:
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side = side
    return A2poRun(ID, {"right": unpadded, "wrong": padded_on_the_right}, tokenizer, **settings)


def train() -> tiny.TrainingResult:
    if tiny.classes("A2PO")[0] is None:
        return tiny.TrainingResult(absent("this release has no A2PO"))
    run = _run("right")
    return tiny.result_of_runs({"right": run}, run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train with a tokenizer that pads on the left, and on prompts of one length."""
    if tiny.classes("A2PO")[0] is None:
        return tiny.TrainingResult(absent("this release has no A2PO"))
    equal = [f"w{row} w{row + 7} w{row + 9}" for row in range(len(PROMPTS))]
    runs = {"left": _run("left"), "one length": _run("right", prompts=equal)}
    for name, run in runs.items():
        run.judged()
        assert not any(run.acted), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("nothing is padded on the right"))
