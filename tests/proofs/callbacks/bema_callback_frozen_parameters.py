"""Train three steps with the real SFTTrainer and a BEMACallback, where the weights between those trained are frozen.

The expected averages are those of the paper's formula (arXiv:2508.00180) on the weights after each step. Each trained
weight has the shape of the weight that it is paired with, so up to 0.24.0 no error is raised.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "BEMACallback makes a second model of the class and the config, which no PeftModel can be made of"}

STEPS = 3
MEASURED = "model.layers.1.self_attn.v_proj.weight"


@dataclass
class Run:
    """A run with a BEMACallback: the weights before it and after each step, and all averages after each step."""

    loss: float = 0.0
    gradients: dict[str, Any] = field(default_factory=dict)
    trained: list[dict[str, Any]] = field(default_factory=list)
    averages: list[dict[str, Any]] = field(default_factory=list)
    saved: dict[str, Any] = field(default_factory=dict)
    failure: str = ""

    def expected(self) -> dict[str, Any]:
        """Return the averaged weights after the last step, by the formula."""
        initial, *trajectory = self.trained
        ema, averaged = dict(initial), dict(self.averages[0])
        for step, current in enumerate(trajectory, 1):
            beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
            for name, weight in current.items():
                ema[name] = (1 - beta) * ema[name] + beta * weight
                averaged[name] = ema[name] + alpha * (weight - initial[name])
        return averaged

    def check(self) -> None:
        """Check all averages, of trained and of frozen weights, after each step and in the folder that is saved."""
        assert not self.failure, self.failure
        assert len(self.averages) == len(self.trained) == STEPS + 1
        for step in range(1, STEPS + 1):
            so_far = Run(trained=self.trained[: step + 1], averages=self.averages)
            distances = _distances(self.averages[step], so_far.expected())
            assert max(distances.values()) < 1e-6, f"the averages after step {step} are off by {distances}"
        assert max(_distances(self.saved, self.averages[-1]).values()) == 0


def train() -> tiny.TrainingResult:
    run = _run(lambda name: name.startswith(("model.embed_tokens", "model.layers.1.self_attn", "model.norm")))
    if run is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    initial, written, expected = (weights[MEASURED] for weights in (run.trained[0], run.averages[-1], run.expected()))
    right = float((expected - initial).abs().max())
    outcome = judge(float((written - initial).abs().max()), right=right, wrong=0.0, error=run.failure)
    # The first trained weight has another shape than the first weight.
    crash = _run(lambda name: not name.startswith("model.embed_tokens"))
    if outcome.verdict.value == "fixed":
        run.check()
        crash.check()
    else:
        assert crash.failure.startswith("RuntimeError: The size of tensor a"), crash.failure
        # After the first step the average of a trained weight is in a frozen one.
        paired = run.averages[-1]["model.layers.0.self_attn.k_proj.weight"]
        assert float((paired - run.expected()["model.layers.1.self_attn.k_proj.weight"]).abs().max()) < 1e-6
    return tiny.TrainingResult(outcome, run.loss, run.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train all parameters, and compare the averaged model too."""
    run = _run(lambda name: True)
    if run is None:
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    run.check()
    averages = {
        f"averaged {name} {step}": weight
        for step, weights in enumerate(run.averages)
        for name, weight in weights.items()
    }
    return tiny.TrainingResult(absent("nothing is frozen"), run.loss, {**run.gradients, **averages})


def _distances(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    assert one.keys() == other.keys()
    return {name: float((weight - other[name]).abs().max()) for name, weight in one.items()}


def _run(is_trained: Callable[[str], bool]) -> Run | None:
    """Train three steps of two micro-batches. An error of the callback ends the run at the first step."""
    import trl
    from datasets import Dataset
    from safetensors.torch import load_file
    from transformers import TrainerCallback
    from trl import SFTConfig, SFTTrainer

    if not hasattr(trl, "BEMACallback"):
        return None
    run = Run()

    class WeightRecorder(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            trainable = ((name, weight) for name, weight in model.named_parameters() if weight.requires_grad)
            run.trained.append({name: weight.detach().clone() for name, weight in trainable})

        on_step_end = on_train_begin

    class AverageRecorder(trl.BEMACallback):
        def on_train_begin(self, *args, **kwargs):
            super().on_train_begin(*args, **kwargs)
            self.record()

        def on_step_end(self, *args, **kwargs):
            try:
                super().on_step_end(*args, **kwargs)
            finally:
                self.record()

        def record(self):
            weights = self.running_model.named_parameters()
            run.averages.append({name: weight.detach().clone() for name, weight in weights})

    trainer_class = tiny.measured(SFTTrainer)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        for name, weight in model.named_parameters():
            weight.requires_grad_(is_trained(name))
        rows = [{"text": " ".join(f"w{index + step}" for step in range(4 + index % 3))} for index in range(12)]
        trainer = tiny.trainer(
            trainer_class,
            model=model,
            args=tiny.config(
                SFTConfig, output_dir=folder, max_length=16, max_steps=STEPS, gradient_accumulation_steps=2
            ),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            callbacks=[WeightRecorder(), AverageRecorder(update_freq=1)],
        )
        try:
            trainer.train()
            run.saved = load_file(f"{folder}/bema/model.safetensors")
        except (ValueError, RuntimeError) as error:
            run.failure = f"{type(error).__name__}: {error}"
    run.loss, run.gradients = trainer.losses[0], trainer.step.gradients
    return run
