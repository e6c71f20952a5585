"""Train two optimizer steps of two micro-batches with the real GRPOTrainer, evaluate, and truncate completions.

Of the four completions of a group one has no end, and ``mask_truncated_completions`` takes it out of the loss. Losses
and accumulated gradients are compared with DAPO (arXiv:2503.14476, equation 8): the sum of the token losses of an
optimizer step over the number of the tokens that have one. In the second step the policy is not any more the one that
generated.
"""

from __future__ import annotations

from typing import Any

from trl_hotfix.authoring import absent, shadowed

import tiny
from tiny import grpo_steps

ID = "grpo-dapo-normaliser-counts-masked-tokens"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer._generate_and_score_completions"
OVERLAYS = ()
PARITY = True
EQUIVALENT = {"applied twice": "the count is that of the mask when the second wrapper sees it"}

LENGTHS = (2, 4, 8, 6)
ENDED = (2, 4, 0, 6)
"""The tokens of a group's completions, and those of the ones that are not truncated."""


def train() -> tiny.TrainingResult:
    try:
        run = _run("dapo")
    except ValueError as error:
        if "Unknown loss type: dapo" not in str(error):
            raise
        return tiny.TrainingResult(absent("this release has no dapo loss"))
    if len([micro_batch for micro_batch in run.micro_batches if not micro_batch.is_training]) != 2:
        raise AssertionError(f"expected two micro-batches of the evaluation: {run.micro_batches}")
    result = run.result
    result.outcome = grpo_steps.judged_steps(run)
    return result


def unaffected() -> tiny.TrainingResult:
    """Train where nothing is truncated, where what is truncated is trained on, and with a loss that needs no count."""
    runs = {
        "complete": _run("dapo", truncated=False),
        "not masked": _run("dapo", mask_truncated_completions=False),
        "bnpo": _run("bnpo"),
    }
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {name}"
    return grpo_steps.several_runs(runs, absent("the count is right, or there is none"))


def _run(loss_type: str, *, truncated: bool = True, **settings: Any) -> tiny.FormulaSteps:
    def formula(trainer: Any, inputs: Any, token_loss: Any, mask: Any) -> dict[str, Any]:
        total = (token_loss * mask).sum()
        # A generation is that of an optimizer step, and an evaluation accumulates nothing.
        groups = 2 if trainer.model.training else 1
        return {"right": total / (groups * sum(ENDED)), "wrong": total / (groups * sum(LENGTHS))}

    make = grpo_steps.grpo
    trainers = []

    def grpo(*args: Any, **kwargs: Any) -> Any:
        trainers.append(make(*args, **kwargs))
        if truncated:
            _truncate(args[1])
        return trainers[-1]

    defaults = {"loss_type": loss_type, "beta": 0.0, "steps_per_generation": 2, "mask_truncated_completions": True}
    with shadowed(grpo_steps, "grpo", grpo):
        run = grpo_steps.grpo_steps(formula, moved=0.1, **{**defaults, **settings})
    (run.trainer,) = trainers
    return run


def _truncate(policy: Any) -> None:
    """Let the longest completion of a group go on where it has ended."""
    complete = policy.generate

    def generate(*args: Any, **kwargs: Any) -> Any:
        tokens = complete(*args, **kwargs)
        last = tokens[:, -1]
        last[last == 1] = 2
        return tokens

    policy.generate = generate
