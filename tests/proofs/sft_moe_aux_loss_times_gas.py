"""The proof: one optimizer step of two micro-batches of a tiny Mixtral with the real SFTTrainer.

What is right is what the same model says of the same micro-batch by itself: its cross-entropy over the tokens of the
step, and half of its auxiliary term. 0.23.0 adds that term twice, which ``sft-aux-loss-counted-twice`` mends: it is on
there in every run.
"""

from __future__ import annotations

import contextlib
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
    """A mixture of experts without accumulation, and a dense model with it."""
    seen = {"one": _train(1), "dense": _train(STEPS, dense=True)}
    gradients = {f"{name}.{key}": it for name, each in seen.items() for key, it in each.gradients.items()}
    return tiny.TrainingResult(absent("nothing is accumulated, or there are no experts"), seen["one"].loss, gradients)


def _train(steps: int, *, dense: bool = False) -> tiny.TrainingResult:
    import torch
    from datasets import Dataset
    from packaging.version import Version
    from trl import SFTConfig, SFTTrainer

    if not SFTTrainer.compute_loss.__module__.startswith("trl."):
        return tiny.TrainingResult(absent("the trainer has the compute_loss of transformers"))
    losses: list[float] = []
    batches: list[dict[str, Any]] = []

    class Measured(SFTTrainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            kept = {key: inputs[key].clone() for key in ("input_ids", "attention_mask", "labels")}
            batches.append({**kept, "num_items_in_batch": kwargs["num_items_in_batch"]})
            result = super().compute_loss(model, inputs, *args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    counted_once = contextlib.nullcontext()
    if version("trl") == "0.23.0":
        counted_once = trl_hotfix.patched("sft-aux-loss-counted-twice")
    with tempfile.TemporaryDirectory() as folder, counted_once:
        make = tiny.llama if dense else lambda *args, **named: tiny.mixtral(*args, coefficient=COEFFICIENT, **named)
        model, alone = (make(folder, seed=0) for _ in range(2))
        seen = tiny.FirstStep(model)
        # All rows the same: in which order they come is no part of what is compared.
        text = {"text": "w2 w6 w10 w14 w18 w22"}
        if Version(version("trl")) >= Version("0.16.0"):  # later releases put an end of sequence after a text
            text = dict(tiny.tokenizer()(text["text"]))
        settings = {} if dense else {"router_aux_loss_coef": COEFFICIENT}
        trainer = tiny.trainer(
            Measured,
            model=model,
            args=tiny.config(SFTConfig, gradient_accumulation_steps=steps, max_length=16, **settings),
            train_dataset=Dataset.from_list([text] * 8),
            tokenizer=tiny.tokenizer(),
        )
        trainer.train()
    if dense:
        return tiny.TrainingResult(absent("there are no experts"), losses[0], seen.gradients)
    with torch.no_grad():
        said = alone(**batches[0], output_router_logits=True)
    whole, aux_loss = float(said.loss), float(said.aux_loss)
    right = whole - COEFFICIENT * aux_loss * (1 - 1 / steps)
    outcome = judge(losses[0], right=right, wrong=whole, coefficient=COEFFICIENT, aux_loss=aux_loss)
    return tiny.TrainingResult(outcome, losses[0], seen.gradients)
