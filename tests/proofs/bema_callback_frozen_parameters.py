"""The proof: two steps of the real SFTTrainer with a BEMACallback, of which only the head is trained.

What is right is the paper's formula (arXiv:2508.00180) on the weights as they are after each step. The first of all
parameters, the embeddings, has the shape of the head: up to 0.24.0 nothing is raised.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "BEMACallback makes a second model of the class and the config, which no PeftModel can be made of"}


def train() -> tiny.TrainingResult:
    first_step, callback, weights, failure = _two_steps(head_alone=True)
    if callback is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    (before,) = weights[0].values()
    (right,) = _formula(weights).values()
    running = dict(callback.running_model.named_parameters())
    its, embeddings = running["lm_head.weight"], running["model.embed_tokens.weight"]
    written = "head" if bool((its != before).any()) else "embeddings"
    away = float((its - right).abs().max() if written == "head" else (embeddings - right).abs().max())
    # An error ends the first of the two updates, after what can be written is written.
    if failure is None and away > 1e-6:
        raise AssertionError(f"the average is written into the {written}, and off by {away}")
    outcome = judge(float((its - before).abs().max()), right=float((right - before).abs().max()), wrong=0.0)
    outcome.numbers.update(written_into=written, error=failure)
    return tiny.TrainingResult(outcome, *first_step)


def unaffected() -> tiny.TrainingResult:
    """Nothing frozen: the averaged model is part of what is compared."""
    (loss, gradients), callback, _, failure = _two_steps(head_alone=False)
    if callback is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    if failure is not None:
        raise AssertionError(failure)
    averaged = {f"averaged {name}": its.detach().clone() for name, its in callback.running_model.named_parameters()}
    return tiny.TrainingResult(absent("nothing is frozen"), loss, {**gradients, **averaged})


def _formula(weights: list[dict[str, Any]]) -> dict[str, Any]:
    """The averaged weights after the last of ``weights``, of which the first is before training."""
    first, *others = weights
    ema, averaged = {name: its.clone() for name, its in first.items()}, {}
    for step, now in enumerate(others, 1):
        beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
        for name, its in now.items():
            ema[name] = (1 - beta) * ema[name] + beta * its
            averaged[name] = ema[name] + alpha * (its - first[name])
    return averaged


def _two_steps(head_alone: bool) -> tuple[tuple[float, dict[str, Any]], Any, list[dict[str, Any]], str | None]:
    """First loss and gradients; the callback; the trained weights before training and after each step; an error."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if not hasattr(trl, "BEMACallback"):
        return (0.0, {}), None, [], None
    losses: list[float] = []
    weights: list[dict[str, Any]] = []

    class Measured(SFTTrainer):
        def compute_loss(self, *args, **kwargs):
            result = super().compute_loss(*args, **kwargs)
            losses.append(float((result[0] if isinstance(result, tuple) else result).detach()))
            return result

    class Watching(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            weights.append({name: its.detach().clone() for name, its in model.named_parameters() if its.requires_grad})

        on_step_end = on_train_begin

    failure = None
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        if head_alone:
            model.model.requires_grad_(False)
        seen = tiny.FirstStep(model)
        rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
        callback = trl.BEMACallback(update_freq=1)
        trainer = tiny.trainer(
            Measured,
            model=model,
            args=tiny.config(SFTConfig, max_length=16, max_steps=2),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            callbacks=[Watching(), callback],
        )
        try:
            trainer.train()
        except ValueError as error:
            if not str(error).startswith("zip()"):
                raise
            failure = f"ValueError: {error}"
    return (losses[0], seen.gradients), callback, weights, failure
