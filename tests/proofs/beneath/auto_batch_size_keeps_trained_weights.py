"""Train with the real SFT and DPO trainers, and run out of memory after two steps of two micro-batches.

Each says once that the second attempt goes on from trained weights. With the option it is, step by step, the run that
has the smaller batch from its beginning: weights, gradients, losses and learning rates. A run with enough memory gets
no line, nor does one that runs out in its first step.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range
from trl_hotfix.patching import engine

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "auto-batch-size-keeps-trained-weights"
OVERLAYS = ()
PARITY = False
VARIANTS = "It changes nothing that is computed, unless an option says so."

METHODS = ("SFT", "DPO")
STEPS, STEPS_BEFORE, BATCH = 4, 2, 4


def train() -> tiny.TrainingResult:
    if in_range(metadata.version("trl"), "<0.24.0"):
        return tiny.TrainingResult(absent("the trainers have no base in TRL, and the patch is not for them"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said, runs = 0, {}
    for method in METHODS:
        runs[method], lines = trained(method, runs_out_after=STEPS_BEFORE)
        first, *_ = steps = runs[method].steps
        assert len(steps) == STEPS_BEFORE + STEPS, method
        assert not same([first], [steps[STEPS_BEFORE]]), f"{method}: the second attempt has the first weights"
        assert len(lines) == patched, (method, lines)
        said += len(lines)
    for method in METHODS if patched else ():
        with engine.ENGINE.patched((ID,), True, {ID: {"weights": "restored"}}, unknown_body="try"):
            restored, lines = trained(method, runs_out_after=STEPS_BEFORE)
        smaller = restored._train_batch_size
        assert smaller < BATCH
        expected, _ = trained(method, batch=smaller)
        assert not lines, (method, lines)
        assert same(restored.steps[STEPS_BEFORE:], expected.steps), (
            f"{method}: another run than with a batch of {smaller}"
        )
        assert rates(restored)[-STEPS:] == rates(expected), method
    return tiny.result_of_runs(runs, judge(said, right=len(METHODS), wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train with enough memory, and run out of it in the first step."""
    runs = {}
    for method in METHODS:
        for name, settings in {"enough": {}, "first step": {"runs_out_after": 0}}.items():
            runs[f"{method} {name}"], lines = trained(method, **settings)
            assert not lines, (method, name, lines)
    return tiny.result_of_runs(runs, absent("no step has trained the weights of an attempt before"))


def same(some: list[Any], others: list[Any]) -> bool:
    """Return whether the weights before each step, its gradients and its losses are equal."""
    return all(
        [part.loss for part in one.micro_batches] == [part.loss for part in other.micro_batches]
        and all(value.equal(other.weights[name]) for name, value in one.weights.items())
        and all(value.equal(other.gradients[name]) for name, value in one.gradients.items())
        for one, other in zip(some, others, strict=True)
    )


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def trained(method: str, *, batch: int = BATCH, runs_out_after: int | None = None) -> tuple[Any, list[str]]:
    """Train, and return the trainer and what trl_hotfix says of its second attempt."""
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)

    class ShortOfMemory(tiny.stepwise(trainer_class)):  # type: ignore[misc]
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            # The second attempt has a smaller batch.
            is_first_attempt = self._train_batch_size == batch
            if is_first_attempt and self.is_new_step and len(self.steps) == runs_out_after:
                raise RuntimeError("CUDA out of memory.")
            return super().compute_loss(*args, **kwargs)

    rows = (
        Dataset.from_list([{"text": words(number, 3 + number % 9)} for number in range(32)])
        if method == "SFT"
        else Dataset.from_list([row for _ in range(4) for row in preferences_of_several_lengths()])
    )
    with tempfile.TemporaryDirectory() as folder:

        def run() -> Any:
            trainer = tiny.trainer(
                ShortOfMemory,
                model=tiny.llama(folder, seed=0),
                args=tiny.config(
                    config_class,
                    output_dir=folder,
                    max_steps=STEPS,
                    max_length=32,
                    per_device_train_batch_size=batch,
                    gradient_accumulation_steps=2,
                    auto_find_batch_size=batch == BATCH,
                    learning_rate=1e-3,
                    warmup_steps=2,
                ),
                train_dataset=rows,
                tokenizer=tiny.tokenizer(),
            )
            trainer.train()
            return trainer

        trainer, lines = tiny.warnings_of(run)
    return trainer, [line for line in lines if "memory ran out" in line]
