"""The proof: two optimizer steps of two micro-batches of a tiny Mixtral with the real SFTTrainer.

The expected loss of a micro-batch is what the same model computes from it without a trainer: its cross-entropy over the
tokens of the step, and half of its auxiliary term; the expected gradients are those of that loss. An evaluation has the
whole term. 0.23.0 adds the term twice, which ``sft-aux-loss-counted-twice`` repairs: that patch is applied there in
every run.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import sys
import tempfile
from importlib.metadata import version
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.testing import SftMoeStep

import tiny

ID = "sft-moe-aux-loss-times-gas"
TARGET = "trl.trainer.sft_trainer:SFTTrainer.compute_loss"
COEFFICIENT = 0.5
OVERLAYS = ()
PARITY = True
EQUIVALENT = {
    "_owners_in: `if not owners or {place: type(owner) for place, owner in owners.items()} != _places[model]:` -> "
    "always": "all modules are looked at in each call: it only takes longer",
    "_owners_in: without `_places[model] = {place: type(owner) for place, owner in owners.items()}`": (
        "all modules are looked at in each call: it only takes longer"
    ),
    "_owners_in: `if config not in configs or not attributes.keys().isdisjoint(_COEFFICIENTS):` -> always": (
        "modules without a coefficient are looked at in each call: it only takes longer"
    ),
    "_owners_in: without `configs.add(config)`": (
        "a config is looked at for each module that has it: it only takes longer"
    ),
}

STEPS = 2


def train() -> tiny.TrainingResult:
    from packaging.version import Version

    if not has_own_loss():
        return tiny.TrainingResult(absent("the trainer has the compute_loss of transformers"))
    trainer, model = trained(STEPS)
    first = trainer.steps[0]
    loss = sum(one.loss for one in first.micro_batches)
    numbers = [tiny.loss_of_model(model, first.weights, one) for one in first.micro_batches]
    wrong, aux_loss = (float(sum(values).detach()) for values in zip(*numbers, strict=True))
    right = wrong - COEFFICIENT * aux_loss * (1 - 1 / STEPS)
    outcome = judge(loss, right=right, wrong=wrong, coefficient=COEFFICIENT, aux_loss=aux_loss)
    if outcome.verdict.value == "fixed":
        for step in trainer.steps:
            check_step(model, step)
        if Version(version("trl")) < Version("1.15.0"):
            evaluated = trainer.evaluations[0]
            expected = float(tiny.loss_of_model(model, trainer.model.state_dict(), evaluated)[0].detach())
            assert abs(evaluated.loss - expected) < 1e-5, f"an evaluation has the loss {evaluated.loss}: {expected}"
            warns_once()
    acted = tiny.acts(ID, TARGET, trainer)
    assert acted in (None, 2 * STEPS), f"the wrapper acted in {acted} calls"
    return tiny.TrainingResult(outcome, loss, first.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a mixture of experts without accumulation, and a dense model and one with a coefficient of 0 with it."""
    if not has_own_loss():
        return tiny.TrainingResult(absent("the trainer has the compute_loss of transformers"))
    runs = {"one": trained(1), "dense": trained(STEPS, dense=True), "zero": trained(STEPS, coefficient=0.0)}
    for name, (trainer, _) in runs.items():
        assert not tiny.acts(ID, TARGET, trainer), f"the wrapper acts: {name}"
    gradients = {
        f"{name} {number}.{weight}": gradient
        for name, (trainer, _) in runs.items()
        for number, step in enumerate(trainer.steps)
        for weight, gradient in step.gradients.items()
    }
    loss = sum(
        one.loss for trainer, _ in runs.values() for one in (*trainer.steps[0].micro_batches, *trainer.evaluations)
    )
    return tiny.TrainingResult(absent("nothing is accumulated, or there is no such term"), loss, gradients)


def has_own_loss() -> bool:
    from trl import SFTTrainer

    return inspect.unwrap(SFTTrainer.compute_loss).__module__.startswith("trl.")


def trained(steps: int, *, dense: bool = False, coefficient: float = COEFFICIENT) -> tuple[Any, Any]:
    """Return the trainer of two steps of ``steps`` micro-batches, which has evaluated once, and another such model."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    counted_once = contextlib.nullcontext()
    if version("trl") == "0.23.0":
        counted_once = trl_hotfix.patched("sft-aux-loss-counted-twice")
    with tempfile.TemporaryDirectory() as folder, counted_once:
        make, keywords = (tiny.llama, {}) if dense else (tiny.mixtral, {"coefficient": coefficient})
        model, copy = (make(folder, seed=0, **keywords) for _ in range(2))
        settings = {} if dense else {"router_aux_loss_coef": coefficient}
        settings |= {"gradient_accumulation_steps": steps, "max_steps": 2, "max_length": 16}
        rows = Dataset.from_list([{"text": "w2 w6 w10 w14"}] * 8)
        trainer = tiny.trainer(
            tiny.stepwise(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, dataset_text_field="text", **settings),
            train_dataset=rows,
            eval_dataset=rows.select(range(2)),
            tokenizer=tiny.tokenizer(),
            # Releases shuffle differently.
            data_collator=FixedBatches(),
        )
        trainer.train()
        trainer.evaluate()
    return trainer, copy


class FixedBatches:
    """A collator of batches of two rows of different lengths, one after the other, whatever the examples are."""

    def __init__(self) -> None:
        self.numbers = itertools.count()

    def __call__(self, examples: Any) -> dict[str, Any]:
        import torch

        first = 5 + 3 * next(self.numbers)
        rows = [torch.arange(first, first + 6), torch.arange(first + 9, first + 9 + 2 + first % 4)]
        ids = torch.nn.utils.rnn.pad_sequence([row % 60 + 3 for row in rows], batch_first=True)
        return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": ids.masked_fill(ids == 0, -100)}


def check_step(model: Any, step: tiny.Step) -> None:
    """Assert that a step has the losses and the accumulated gradients of the formula."""

    def expected(model: Any) -> Any:
        parts = [tiny.loss_of_model(model, None, one) for one in step.micro_batches]
        losses = [loss - COEFFICIENT * aux_loss * (1 - 1 / STEPS) for loss, aux_loss in parts]
        for one, loss in zip(step.micro_batches, losses, strict=True):
            assert abs(one.loss - loss.item()) < 1e-5, f"a micro-batch has the loss {one.loss}: expected {loss.item()}"
        return sum(losses)

    difference = step.difference(tiny.expected_gradients(model, step.weights, expected))
    assert difference < 1e-5, f"gradients differ by {difference}"


def warns_once() -> None:
    """Assert that one warning is logged, if at all, where the coefficient of the model is not found."""
    for enabled in (True, False):
        step = SftMoeStep(
            sys.modules["trl.trainer.sft_trainer"],
            COEFFICIENT,
            current_gradient_accumulation_steps=STEPS,
            aux_loss_enabled=enabled,
        )
        del step.model.router_aux_loss_coef
        step.coefficient = lambda: COEFFICIENT
        _, messages = tiny.warnings_of(lambda step=step: [step.weights() for _ in range(2)])
        assert len(messages) == enabled, f"the warnings are {messages}"
