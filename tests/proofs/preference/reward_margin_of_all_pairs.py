"""Train two steps of two unequal micro-batches, and evaluate, with the real RewardTrainer on pairs with margins.

The steps have size 0, so that all losses are of the same weights.

Losses and gradients are compared with the formula of Bradley and Terry with margins (Llama 2, equation 2), for the
margin of each pair, and for the margins of all pairs of its micro-batch.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.measuring import gradient_differences

ID, TARGET = "reward-margin-of-all-pairs", "trl.trainer.reward_trainer:RewardTrainer.compute_loss"
OVERLAYS = ()
PARITY = True
VARIANTS = {"lora": "the proof trains a classifier, which is made without an adapter"}

SIDES = ("chosen", "rejected")
MARGINS = (0.0, 2.0, 0.5, 3.0, 1.0, 0.0, 2.5, 1.5)


def train() -> tiny.TrainingResult:
    outcome, result = judged(reward(rows()))
    # One pair at a time has only its own margin.
    alone, _ = judged(reward(rows(), per_device_train_batch_size=1, per_device_eval_batch_size=1))
    assert alone.verdict is Verdict.FIXED
    result.outcome = outcome
    return result


def unaffected() -> tiny.TrainingResult:
    """Train on pairs without margins."""
    run = reward([{name: row[name] for name in row if name != "margin"} for row in rows()])
    assert not tiny.acts(ID, TARGET, run), "the wrapper acts"
    outcome, result = judged(run)
    assert outcome.verdict is Verdict.FIXED
    result.outcome = absent("the pairs have no margins")
    return result


def is_of_one_batch() -> bool:
    """Return whether the trainer scores both sides in one batch, as from 0.24.0 on."""
    from trl.trainer import reward_trainer

    return not hasattr(reward_trainer, "RewardDataCollatorWithPadding")


def name_of(side: str) -> str:
    """Return the column with the tokens of a side."""
    from trl.trainer import reward_trainer

    if not is_of_one_batch():
        return f"input_ids_{side}"
    old = f"{side}_input_ids"
    return old if old in Path(reward_trainer.__file__).read_text() else f"{side}_ids"


def rows() -> list[dict[str, Any]]:
    """Return tokenized pairs of several lengths, with margins."""
    found = []
    for index, margin in enumerate(MARGINS):
        tokens = {
            "chosen": [(7 * index + 3 * place) % 50 + 5 for place in range(2 + index % 3)],
            "rejected": [(5 * index + 11 * place) % 50 + 5 for place in range(1 + index % 4)],
        }
        row: dict[str, Any] = {name_of(side): tokens[side] for side in SIDES}
        if not is_of_one_batch():
            row |= {f"attention_mask_{side}": [1] * len(tokens[side]) for side in SIDES}
        found.append({**row, "margin": margin})
    return found


def reward(data: list[dict[str, Any]], **settings: Any) -> Any:
    """Return a trainer that has taken two steps of size 0, and evaluated."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForSequenceClassification, Trainer
    from trl import RewardConfig, RewardTrainer

    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    fields = {"optim": "sgd", "learning_rate": 0.0, "max_length": 32, "center_rewards_coefficient": None}
    with tempfile.TemporaryDirectory() as folder:
        tiny.llama(folder, seed=0)
        model = AutoModelForSequenceClassification.from_pretrained(str(Path(folder, "llama-0")), num_labels=1)
    score = model.score.weight
    score.data = 0.1 * torch.cos(torch.arange(score.numel())).reshape(score.shape)
    trainer = tiny.trainer(
        tiny.measured(RewardTrainer),
        model=model,
        args=tiny.config(RewardConfig, **{**fields, **sizes, **settings}),
        train_dataset=Dataset.from_list(data),
        eval_dataset=Dataset.from_list(data[:3]),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    Trainer.evaluate(trainer)  # TRL's own draws a table first.
    return trainer


def rewards_of(model: Any, weights: dict[str, Any], inputs: dict[str, Any]) -> list[Any]:
    """Return the rewards of both sides, (pairs,) each, of rows without padding."""
    import torch

    if is_of_one_batch():
        both = inputs["input_ids"], inputs["attention_mask"]
        sides = list(zip(*(part.chunk(2) for part in both), strict=True))
    else:
        sides = [(inputs[f"input_ids_{side}"], inputs[f"attention_mask_{side}"]) for side in SIDES]
    found = []
    for ids, mask in sides:
        rows = [row[kept.bool()][None] for row, kept in zip(ids, mask, strict=True)]
        keywords = [{"input_ids": row, "use_cache": False} for row in rows]
        scores = [torch.func.functional_call(model, weights, kwargs=each).logits[0, 0] for each in keywords]
        found.append(torch.stack(scores))
    return found


def loss_of(rewards: list[Any], margins: Any, kind: str) -> Any:
    """Return the loss of a micro-batch. Pairs without margins have margins of 0."""
    import torch

    difference = rewards[0] - rewards[1]
    margins = torch.zeros_like(difference) if margins is None else margins
    left = difference - margins if kind == "right" else difference[:, None] - margins
    return torch.nn.functional.softplus(-left).mean()


def judged(trainer: Any) -> tuple[Outcome, tiny.TrainingResult]:
    """Judge the losses of all micro-batches and of the evaluation, and the gradient of the first."""
    import torch

    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.named_parameters()}
    outcomes, differ = [], []
    for inputs, loss in zip(trainer.batches, trainer.losses, strict=True):
        rewards = rewards_of(model, weights, inputs)
        losses = {kind: float(loss_of(rewards, inputs.get("margin"), kind).detach()) for kind in ("right", "wrong")}
        differ.append(abs(losses["right"] - losses["wrong"]) > 1e-4)
        # A batch of one pair, or without margins, is right either way.
        outcomes.append(judge(loss, right=losses["right"], wrong=losses["wrong"] if differ[-1] else loss + 1))
    verdicts = {outcome.verdict for outcome, does in zip(outcomes, differ, strict=True) if does}
    assert len(verdicts) <= 1, outcomes
    assert all(outcome.verdict is Verdict.FIXED for outcome, does in zip(outcomes, differ, strict=True) if not does)
    # Two steps of two, and two batches of the evaluation or three.
    assert len(outcomes) >= 6, outcomes
    kind = "wrong" if Verdict.REPRODUCED in verdicts else "right"
    first = trainer.batches[0]
    total = loss_of(rewards_of(model, weights, first), first.get("margin"), kind)
    names = list(trainer.step.gradients)
    expected = torch.autograd.grad(total, [weights[name] for name in names])
    expected = dict(zip(names, expected, strict=True))
    largest = max(names, key=lambda name: float(expected[name].abs().max()))
    # transformers divides it by the micro-batches of a step, or not, or twice.
    measured = float(trainer.step.gradients[largest].norm() / expected[largest].norm())
    factor = min((1, 0.5, 0.25), key=lambda one: abs(measured - one))
    assert abs(measured - factor) < 1e-4, measured
    gradients = {name: gradient / factor for name, gradient in trainer.step.gradients.items()}
    difference = max(gradient_differences(gradients, expected))
    assert difference < 1e-5, f"the gradient differs from the {kind} one by {difference}"
    return outcomes[0], tiny.TrainingResult(outcomes[0], sum(trainer.losses) / len(trainer.losses), gradients)
