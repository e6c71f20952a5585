"""Train two steps of two micro-batches, and evaluate, with the real A2POTrainer, whose prompts are partly too long.

Losses and gradients are compared with those of the formula, a sequence at a time: on the last and on the first tokens
of each prompt.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny.a2po_runs import A2poRun, unpadded

OVERLAYS = ()
PARITY = False
EQUIVALENT = {"applied twice": "the view of a view cuts on the same side"}

ID, LIMIT = "a2po-prompt-cut-on-the-right", 3


def _run(limit: int | None, side: str = "right") -> A2poRun:
    tokenizer = tiny.tokenizer()
    tokenizer.padding_side, tokenizer.truncation_side = "left", side
    kinds = {
        "right": lambda prompts: unpadded([ids[-(limit or 99) :] for ids in prompts]),
        "wrong": lambda prompts: unpadded([ids[:limit] for ids in prompts]),
    }
    return A2poRun(ID, kinds, tokenizer, max_prompt_length=limit)


def train() -> tiny.TrainingResult:
    if tiny.classes("A2PO")[0] is None:
        return tiny.TrainingResult(absent("this release has no A2PO"))
    run = _run(LIMIT)
    return tiny.result_of_runs({"right": run}, run.judged())


def unaffected() -> tiny.TrainingResult:
    """Train with a tokenizer that cuts on the left, on prompts that fit, and without a limit."""
    if tiny.classes("A2PO")[0] is None:
        return tiny.TrainingResult(absent("this release has no A2PO"))
    runs: dict[str, Any] = {"left": _run(LIMIT, "left"), "fit": _run(7), "all": _run(None)}
    for name, run in runs.items():
        run.judged()
        assert not any(run.acted), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("nothing is cut on the right"))
