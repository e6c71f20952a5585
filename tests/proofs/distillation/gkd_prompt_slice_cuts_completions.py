"""Train two optimizer steps with the real GKDTrainer on conversations of several lengths, and evaluate.

Losses and gradients are compared with the divergence, which is computed without TRL: over all tokens of the
completions, and over those behind the longest prompt of the batch. Steps of two micro-batches are judged by the
formula; steps of one are compared with 1.7.0, which weighs the tokens of micro-batches in another way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trl_hotfix.authoring import absent

import tiny
from tiny import distillation, gkd_steps, grpo_steps
from tiny.gkd_steps import words

ID = "gkd-prompt-slice-cuts-completions"
OVERLAYS = ()
PARITY = ">=0.11.3"
"""Before, TRL mixes log-probs and not probabilities: the loss is another one."""
EQUIVALENT = {
    "applied twice": "the inner wrapper is given prompts of one column, before which there are no labels",
    "first row for all": "of the prompts TRL takes the width alone",
}


PROMPTS = range(1, 17, 2)
ROWS = [(words(number, length), words(number + 30, 17 + number % 2 - length)) for number, length in enumerate(PROMPTS)]
"""Of each two of these rows, the one with the shorter prompt has the longer completion, which is cut."""


def train() -> tiny.TrainingResult:
    if tiny.classes("GKD")[0] is None:
        return tiny.TrainingResult(absent("this release has no GKD"))
    runs = {"one": run(gradient_accumulation_steps=1), "accumulated": run()}
    outcomes = [grpo_steps.judged_steps(steps) for steps in runs.values()]
    if outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"the runs do not agree: {outcomes}")
    for steps in runs.values():
        acted = tiny.acts(ID, target(), steps.trainer)
        cut = sum(abs(part.expected["right"] - part.expected["wrong"]) > 1e-7 for part in steps.micro_batches)
        assert acted in (None, cut), f"the wrapper acts in {acted} of {cut} calls"
        assert cut, "nothing is cut off"
    return grpo_steps.several_runs({"one": runs["one"]}, outcomes[0])


def target() -> str:
    return f"{tiny.classes('GKD')[0].__module__}:GKDTrainer.compute_loss"


def whole_or_cut(batch: Mapping[str, Any], divergence: Any, items: float | None) -> dict[str, Any]:
    """Return the loss over all labels (``right``), and over those behind the longest prompt (``wrong``)."""
    import torch

    is_label = batch["labels"][:, 1:] != -100
    behind = torch.arange(1, batch["labels"].shape[1]) >= batch["prompts"].shape[1]

    def mean(counted: Any) -> Any:
        divides = distillation.divides_by_a_count("GKD") and items is not None
        return (divergence * counted).sum() / (items if divides else counted.sum())

    return {"right": mean(is_label), "wrong": mean(is_label & behind)}


def run(rows: Any = ROWS, formula: gkd_steps.Formula = whole_or_cut, **settings: Any) -> Any:
    return gkd_steps.gkd_steps(formula, rows, per_device_train_batch_size=2, per_device_eval_batch_size=3, **settings)


def unaffected() -> tiny.TrainingResult:
    """Train on rows of which nothing is cut off, one at a time, and on completions that are generated."""
    alike = [(words(number, 2), words(number + 9, 3)) for number in range(8)]
    runs = {
        "alike": run(alike),
        "one row": gkd_steps.gkd_steps(whole_or_cut, ROWS, per_device_train_batch_size=1, per_device_eval_batch_size=1),
        "generated": run(alike, generate=distillation.growing_completions(), lmbda=1.0),
    }
    for name, steps in runs.items():
        assert not tiny.acts(ID, target(), steps.trainer), f"the wrapper acts: {name}"
    return grpo_steps.several_runs(runs, absent("nothing is cut off"))
