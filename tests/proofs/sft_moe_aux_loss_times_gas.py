"""The proof: one optimizer step of two micro-batches of a tiny Mixtral with the real SFTTrainer.

The expected loss is what the same model computes from the same micro-batch without a trainer: its cross-entropy over
the tokens of the step, and half of its auxiliary term. 0.23.0 adds that term twice, which
``sft-aux-loss-counted-twice`` repairs: that patch is applied there in every run.
"""

from __future__ import annotations

import contextlib
import inspect
import tempfile
from importlib.metadata import version
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

COEFFICIENT = 0.5
OVERLAYS = ()
PARITY = True

STEPS = 2


def train() -> tiny.TrainingResult:
    return _train(STEPS)


def unaffected() -> tiny.TrainingResult:
    """Train a mixture of experts without accumulation, and a dense model with it."""
    results = {"one": _train(1), "dense": _train(STEPS, dense=True)}
    gradients = {
        f"{run}.{name}": gradient for run, result in results.items() for name, gradient in result.gradients.items()
    }
    outcome = absent("nothing is accumulated, or there are no experts")
    return tiny.TrainingResult(outcome, results["one"].loss, gradients)


def _train(steps: int, *, dense: bool = False) -> tiny.TrainingResult:
    import torch
    from datasets import Dataset
    from packaging.version import Version
    from trl import SFTConfig, SFTTrainer

    if not inspect.unwrap(SFTTrainer.compute_loss).__module__.startswith("trl."):
        return tiny.TrainingResult(absent("the trainer has the compute_loss of transformers"))
    counted_once = contextlib.nullcontext()
    if version("trl") == "0.23.0":
        counted_once = trl_hotfix.patched("sft-aux-loss-counted-twice")
    with tempfile.TemporaryDirectory() as folder, counted_once:
        make, coefficient = (tiny.llama, {}) if dense else (tiny.mixtral, {"coefficient": COEFFICIENT})
        model, untrained = (make(folder, seed=0, **coefficient) for _ in range(2))
        # All rows are equal, so that their order does not matter.
        text = {"text": "w2 w6 w10 w14 w18 w22"}
        if Version(version("trl")) >= Version("0.16.0"):  # later releases put an end of sequence after a text
            text = dict(tiny.tokenizer()(text["text"]))
        settings = {} if dense else {"router_aux_loss_coef": COEFFICIENT}
        trainer = tiny.trainer(
            tiny.measured(SFTTrainer),
            model=model,
            args=tiny.config(SFTConfig, gradient_accumulation_steps=steps, max_length=16, **settings),
            train_dataset=Dataset.from_list([text] * 8),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    loss, gradients = trainer.losses[0], trainer.step.gradients
    if dense:
        return tiny.TrainingResult(absent("there are no experts"), loss, gradients)
    batch: dict[str, Any] = {key: trainer.batches[0][key] for key in ("input_ids", "attention_mask", "labels")}
    batch["num_items_in_batch"] = trainer.keywords[0]["num_items_in_batch"]
    with torch.no_grad():
        outputs = untrained(**batch, output_router_logits=True)
    wrong, aux_loss = float(outputs.loss), float(outputs.aux_loss)
    right = wrong - COEFFICIENT * aux_loss * (1 - 1 / steps)
    outcome = judge(loss, right=right, wrong=wrong, coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.TrainingResult(outcome, loss, gradients)
