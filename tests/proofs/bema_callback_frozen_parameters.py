"""Train two steps with the real SFTTrainer and a BEMACallback, where only the head is trainable.

The expected result is the paper's formula (arXiv:2508.00180) on the weights after each step. The model's first
parameter, the embedding matrix, has the shape of the head, so up to 0.24.0 no error is raised.
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
    first_step, callback, weights, failure = _two_steps(train_head_only=True)
    if callback is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    (initial,) = weights[0].values()
    (expected,) = _averaged_weights(weights).values()
    running = dict(callback.running_model.named_parameters())
    head, embeddings = running["lm_head.weight"], running["model.embed_tokens.weight"]
    written = "head" if bool((head != initial).any()) else "embeddings"
    error = float(((head if written == "head" else embeddings) - expected).abs().max())
    # An exception ends the first of the two updates, after the callback has written what it could.
    if failure is None and error > 1e-6:
        raise AssertionError(f"the average is written into the {written}, and off by {error}")
    outcome = judge(float((head - initial).abs().max()), right=float((expected - initial).abs().max()), wrong=0.0)
    outcome.numbers.update(written_into=written, error=failure)
    return tiny.TrainingResult(outcome, *first_step)


def unaffected() -> tiny.TrainingResult:
    """Train all parameters, and compare the averaged model too."""
    (loss, gradients), callback, _, failure = _two_steps(train_head_only=False)
    if callback is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    if failure is not None:
        raise AssertionError(failure)
    averaged = {
        f"averaged {name}": parameter.detach().clone() for name, parameter in callback.running_model.named_parameters()
    }
    return tiny.TrainingResult(absent("nothing is frozen"), loss, {**gradients, **averaged})


def _averaged_weights(weights: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the averaged weights after the last step; the first of ``weights`` are those before training."""
    initial, *trajectory = weights
    ema, averaged = {name: weight.clone() for name, weight in initial.items()}, {}
    for step, current in enumerate(trajectory, 1):
        beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
        for name, weight in current.items():
            ema[name] = (1 - beta) * ema[name] + beta * weight
            averaged[name] = ema[name] + alpha * (weight - initial[name])
    return averaged


def _two_steps(train_head_only: bool) -> tuple[tuple[float, dict[str, Any]], Any, list[dict[str, Any]], str | None]:
    """Return first loss and gradients, the callback, the trained weights before and after each step, and an error."""
    import trl
    from datasets import Dataset
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if not hasattr(trl, "BEMACallback"):
        return (0.0, {}), None, [], None
    weights: list[dict[str, Any]] = []

    class WeightRecorder(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            trainable = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
            weights.append({name: weight.detach().clone() for name, weight in trainable})

        on_step_end = on_train_begin

    failure = None
    trainer_class = tiny.measured(SFTTrainer)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        if train_head_only:
            model.model.requires_grad_(False)
        rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(8)]
        callback = trl.BEMACallback(update_freq=1)
        trainer = tiny.trainer(
            trainer_class,
            model=model,
            args=tiny.config(SFTConfig, max_length=16, max_steps=2),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            callbacks=[WeightRecorder(), callback],
        )
        try:
            trainer.train()
        except ValueError as error:
            if not str(error).startswith("zip()"):
                raise
            failure = f"ValueError: {error}"
    return (trainer.losses[0], trainer.step.gradients), callback, weights, failure
