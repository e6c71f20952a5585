"""The proof: two optimizer steps of two micro-batches of a tiny Mixtral with the real SFTTrainer, and an evaluation.

The expected loss of a micro-batch is what the same model computes from it without a trainer; the expected gradients are
those of that loss, accumulated.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent, judge

import tiny

ID = "sft-aux-loss-counted-twice"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
COEFFICIENT = 0.5
OVERLAYS = ()
PARITY = True


def train() -> tiny.TrainingResult:
    with tempfile.TemporaryDirectory() as folder:
        untrained = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        trainer = trained(tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT))
    first = trainer.steps[0]
    numbers = [tiny.loss_of_model(untrained, first.weights, one) for one in first.micro_batches]
    once, aux_loss = (float(sum(values).detach()) for values in zip(*numbers, strict=True))
    if Version(metadata.version("trl")) >= Version("1.16.0"):
        # A micro-batch adds its share of the term there (sft-moe-aux-loss-times-gas).
        once -= COEFFICIENT * aux_loss * (1 - 1 / len(numbers))
    loss = sum(one.loss for one in first.micro_batches)
    twice = once + COEFFICIENT * aux_loss
    outcome = judge(loss, right=once, wrong=twice, coefficient=COEFFICIENT, aux_loss=aux_loss)
    if tiny.acts(ID, TARGET, trainer) is not None:
        check(trainer, untrained)
    return tiny.TrainingResult(outcome, loss, first.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a dense model, and a mixture of experts that is not asked for the router's loss."""
    with tempfile.TemporaryDirectory() as folder:
        unasked = tiny.mixtral(folder, seed=0, coefficient=COEFFICIENT)
        unasked.config.output_router_logits = False
        trainers = {"dense": trained(tiny.llama(folder, seed=0)), "unasked": trained(unasked)}
    steps = {f"{name}.{number}": step for name, one in trainers.items() for number, step in enumerate(one.steps)}
    calls = [one for step in steps.values() for one in step.micro_batches]
    calls += [one for trainer in trainers.values() for one in trainer.evaluations]
    gradients = {f"{name}.{key}": value for name, step in steps.items() for key, value in step.gradients.items()}
    return tiny.TrainingResult(absent("nothing asks for the term"), sum(one.loss for one in calls), gradients)


def trained(model: Any) -> Any:
    """Train ``model`` two steps of two micro-batches, and evaluate."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
    settings = {"gradient_accumulation_steps": 2, "max_steps": 2, "max_length": 16}
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, router_aux_loss_coef=COEFFICIENT, **settings),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:2]),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def check(trainer: Any, untrained: Any) -> None:
    """Assert the accumulated gradients of both steps, the loss of the evaluation, and that each call was repaired."""
    for step in trainer.steps:
        expected = tiny.expected_gradients(
            untrained,
            step.weights,
            lambda model, step=step: sum(tiny.loss_of_model(model, None, one)[0] for one in step.micro_batches),
        )
        assert step.difference(expected) < 1e-5, f"gradients differ by {step.difference(expected)}"
    evaluated = trainer.evaluations[0]
    right = tiny.loss_of_model(untrained, trainer.model.state_dict(), evaluated)[0].item()
    assert abs(evaluated.loss - right) < 1e-5, f"an evaluation has the loss {evaluated.loss}: expected {right}"
    acted, calls = tiny.acts(ID, TARGET, trainer), 4 + len(trainer.evaluations)
    assert acted == calls, f"the wrapper acted in {acted} of {calls} calls"
