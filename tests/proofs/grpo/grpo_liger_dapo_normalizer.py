"""Train two optimizer steps of two micro-batches with the real GRPOTrainer and the loss of Liger, and evaluate.

The completions of the two micro-batches do not have the same number of tokens. Losses and accumulated gradients are
compared with DAPO (arXiv:2503.14476, equation 8): the sum of the token losses of an optimizer step over the number of
their tokens. In a second run truncated completions are out of the loss. Liger is an optional package that the stacks
lack. What it computes replaces it; TRL's own method calls that.
"""

from __future__ import annotations

import functools
import inspect
import statistics
from importlib.metadata import version
from typing import Any

from trl_hotfix.authoring import absent, shadowed

import tiny
from tiny import grpo_steps, liger

ID = "grpo-liger-dapo-normalizer"
TARGET = "trl.trainer.grpo_trainer:GRPOTrainer.compute_liger_loss"
OVERLAYS = ()
PARITY = True
VARIANTS = {"compiled": "the loss of Liger takes the decoder out of the model, and the compiled model is not called"}

LENGTHS = (2, 4, 8, 6, 8, 8, 3, 6)
"""The tokens of the completions of a step. Of the eight in the last one each is of another row."""
ENDED = (2, 4, 0, 6, 0, 0, 3, 6)
"""Those that are left if a completion of eight tokens is truncated, which ends it by no end."""


def train() -> tiny.TrainingResult:
    if not _has_this_loss():
        return tiny.TrainingResult(absent("this release has no loss of Liger that is divided by tokens"))
    runs = {"complete": _run("dapo"), "truncated": _run("dapo", mask_truncated_completions=True)}
    outcomes = [grpo_steps.judged_steps(run) for run in runs.values()]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the runs are not of one kind: {outcomes}")
    return grpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train with a loss that is divided by other numbers, and without Liger."""
    runs = {"bnpo": _run("bnpo"), "without Liger": _run("dapo", with_liger=False)}
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run.trainer), f"the wrapper acts: {name}"
    return grpo_steps.several_runs(runs, absent("the loss is divided by the right number"))


def _has_this_loss() -> bool:
    from trl import GRPOConfig, GRPOTrainer

    has_dapo = "dapo" in str(GRPOConfig.__dataclass_fields__["loss_type"].metadata)
    return has_dapo and hasattr(GRPOTrainer, "compute_liger_loss")


def _run(loss_type: str, *, with_liger: bool = True, **settings: Any) -> tiny.FormulaSteps:
    lengths = ENDED if settings else LENGTHS

    def formula(trainer: Any, inputs: Any, token_loss: Any, mask: Any) -> dict[str, Any]:
        total, own = (token_loss * mask).sum(), mask.sum()
        if trainer.model.training:
            return {"right": total / sum(lengths), "wrong": total / own / 2}
        # Up to 0.27.0 an evaluation is divided by the micro-batches of a step, too.
        divides = tuple(map(int, version("trl").split(".")[:2])) < (0, 27) or version("trl") == "0.27.0"
        return {"right": total / own, "wrong": total / own / (2 if divides else 1)}

    make, trainers = grpo_steps.grpo, []

    def grpo(*args: Any, **kwargs: Any) -> Any:
        trainer = make(*args, **kwargs)
        if with_liger:
            _take_the_loss_of_liger(trainer)
        args[1].generate = _generate
        trainers.append(trainer)
        return trainer

    defaults = {"loss_type": loss_type, "beta": 0.0, "steps_per_generation": 2, "reward_funcs": _reward}
    with shadowed(grpo_steps, "grpo", grpo):
        run = grpo_steps.grpo_steps(formula, moved=0.1, **{**defaults, **settings})
    (run.trainer,) = trainers
    return run


def _reward(completions: list[str], **kwargs: Any) -> list[float]:
    """Return rewards whose deviation in a group is 1: 0.22.0 and 0.22.1 scale when they should not."""
    import torch

    # The trainer shuffles the batch after it has the rewards.
    torch.manual_seed(0)
    rewards = (3.0, 1.0, 4.0, 2.0)
    # TRL divides by the deviation plus 1e-4.
    unit = (1 - 1e-4) / statistics.stdev(rewards)
    return [rewards[row % 4] * unit for row in range(len(completions))]


def _generate(input_ids: Any, **kwargs: Any) -> Any:
    """Return completions of these lengths. Those of eight tokens do not end."""
    import torch

    rows = []
    for row in range(len(input_ids)):
        length = LENGTHS[row % len(LENGTHS)]
        token_ids = [10 + (7 * row + 3 * place) % 50 for place in range(length)]
        rows.append([*token_ids[:-1], 1 if length < 8 else token_ids[-1], *[0] * (8 - length)])
    return torch.cat([input_ids, torch.tensor(rows)], dim=1)


def _take_the_loss_of_liger(trainer: Any) -> None:
    """Have the trainer take the loss of Liger. Releases differ in the names."""
    trainer.use_liger_loss = trainer.use_liger_kernel = True
    trainer._forward_redirection = lambda wrapper, module, method, *args: method(*args)
    names = inspect.unwrap(trainer.compute_liger_loss).__code__.co_names
    setattr(
        trainer,
        "liger_loss" if "liger_loss" in names else "liger_grpo_loss",
        functools.partial(liger.grpo_loss, trainer.args.loss_type),
    )
