"""Train three epochs with the real SFTTrainer and a BEMACallback, and resume from checkpoints, one in the third epoch.

The expected averages are those of the paper's formula (arXiv:2508.00180) on the weights after each step: those of the
run that was stopped up to its checkpoint, and those of the resumed run after it. Where both runs train alike, which
depends on the order of the data in transformers and accelerate, the averages are equal bit by bit.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "BEMACallback makes a second model of the class and the config, which no PeftModel can be made of"}
EQUIVALENT = {
    "_tensors: `return tensors` detached": "the values are copied into the same memory, without a gradient",
    "_tensors: `zip(callback.param_names, parameters, strict=True)` sorted": "the result is a dictionary by name",
}

STEPS, STOPS = 6, (1, 5)
FILE = "trl_hotfix_bema.safetensors"
MEASURED = "model.layers.1.self_attn.v_proj.weight"


@dataclass
class Run:
    """A run with a BEMACallback: the weights before it and after each step, and the averaged model in the end."""

    loss: float = 0.0
    gradients: dict[str, Any] = field(default_factory=dict)
    trained: list[dict[str, Any]] = field(default_factory=list)
    averaged: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl, "BEMACallback"):
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    with tempfile.TemporaryDirectory() as folder:
        whole = _run(folder)
        assert not whole.warnings, whole.warnings
        assert _distance(whole.averaged, _expected(whole.trained)) < 1e-6
        runs = {stop: _run(folder, _checkpoint(folder, stop)) for stop in STOPS}
        with tempfile.TemporaryDirectory() as elsewhere:
            checkpoint = _checkpoint(folder, STOPS[0])
            runs[0] = _run(elsewhere, checkpoint, resume_from_checkpoint=checkpoint)
        outcomes = [_judged(whole, run, stop or STOPS[0]) for stop, run in runs.items()]
        verdicts = {outcome.verdict for outcome in outcomes}
        assert len(verdicts) == 1, outcomes
        without = _run(folder, _without_averages(folder))
    # A checkpoint that was written without the patch leaves nothing to go on with.
    is_fixed = verdicts == {Verdict.FIXED}
    assert [len(run.warnings) for run in (*runs.values(), without)] == [0, 0, 0, int(is_fixed)]
    assert _distance(without.averaged, _expected(without.trained, STOPS[0])) < 1e-6
    gradients = {f"{stop}.{name}": gradient for stop, run in runs.items() for name, gradient in run.gradients.items()}
    return tiny.TrainingResult(outcomes[0], sum(run.loss for run in runs.values()), gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without a stop, and resume from a checkpoint that was written without the patch."""
    import trl

    if not hasattr(trl, "BEMACallback"):
        return tiny.TrainingResult(absent("this release has no BEMACallback"))
    with tempfile.TemporaryDirectory() as folder:
        runs = {"whole": _run(folder)}
        runs["resumed"] = _run(folder, _without_averages(folder))
    values = {
        f"{name}.{kind}.{key}": tensor
        for name, run in runs.items()
        for kind, tensors in (("gradient", run.gradients), ("averaged", run.averaged), ("trained", run.trained[-1]))
        for key, tensor in tensors.items()
    }
    return tiny.TrainingResult(absent("there are no averages to go on with"), runs["whole"].loss, values)


def _judged(whole: Run, resumed: Run, stop: int) -> Any:
    """Judge the averages of a run that was resumed after the step ``stop``."""
    import torch

    initial = whole.trained[0][MEASURED]
    right = _expected([*whole.trained[: stop + 1], *resumed.trained[1:]])
    wrong = _expected(resumed.trained, stop)
    measured, by_formula, by_bug = (
        float((averaged[MEASURED] - initial).abs().max()) for averaged in (resumed.averaged, right, wrong)
    )
    outcome = judge(measured, right=by_formula, wrong=by_bug, stop=stop)
    is_fixed = outcome.verdict is Verdict.FIXED
    assert _distance(resumed.averaged, right if is_fixed else wrong) < 1e-6
    for now, before in zip(resumed.trained, whole.trained[stop:], strict=True):
        if not all(torch.equal(now[name], weight) for name, weight in before.items()):
            return outcome
    assert not is_fixed or all(torch.equal(resumed.averaged[name], value) for name, value in whole.averaged.items())
    return outcome


def _expected(trained: list[dict[str, Any]], begin: int = 0) -> dict[str, Any]:
    """Return the averaged weights after the last step by the formula. The averages begin after the step ``begin``."""
    initial, *trajectory = trained
    average, averaged = dict(initial), dict(initial)
    for step, current in enumerate(trajectory, begin + 1):
        if step % 2:
            continue
        beta, alpha = (10 + step) ** -0.5, (10 + step) ** -0.2
        for name, weight in current.items():
            average[name] = (1 - beta) * average[name] + beta * weight
            averaged[name] = average[name] + alpha * (weight - initial[name])
    return averaged


def _distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((weight - other[name]).abs().max()) for name, weight in one.items())


def _checkpoint(folder: str, step: int) -> str:
    return f"{folder}/checkpoint-{step}"


def _without_averages(folder: str) -> str:
    """Return the first checkpoint, as it is without the patch."""
    checkpoint = _checkpoint(folder, STOPS[0])
    Path(checkpoint, FILE).unlink(missing_ok=True)
    return checkpoint


def _run(folder: str, checkpoint: str | None = None, **settings: Any) -> Run:
    """Train steps of two micro-batches, two of them in an epoch. A run that is not resumed saves at each stop."""
    from datasets import Dataset
    from safetensors.torch import load_file
    from transformers import TrainerCallback
    from trl import BEMACallback, SFTConfig, SFTTrainer

    run = Run()

    class WeightRecorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            run.trained.append({name: weight.detach().clone() for name, weight in model.named_parameters()})
            control.should_save = state.global_step in STOPS and checkpoint is None

        on_step_end = on_train_begin

    trainer_class = tiny.measured(SFTTrainer)
    with tempfile.TemporaryDirectory() as models:
        rows = [{"text": " ".join(f"w{index + step}" for step in range(3 + index % 4))} for index in range(8)]
        trainer = tiny.trainer(
            trainer_class,
            model=tiny.llama(models, seed=0),
            args=tiny.config(
                SFTConfig,
                output_dir=folder,
                max_length=16,
                max_steps=STEPS,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                **settings,
            ),
            train_dataset=Dataset.from_list(rows),
            tokenizer=tiny.tokenizer(),
            callbacks=[WeightRecorder(), BEMACallback(update_freq=2)],
        )
        _, run.warnings = tiny.warnings_of(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    run.averaged = load_file(f"{folder}/bema/model.safetensors")
    run.loss, run.gradients = sum(trainer.losses), trainer.step.gradients
    return run
