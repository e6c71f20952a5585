"""Train three epochs with each real trainer that can move its reference, and resume from checkpoints.

The expected reference is ``(1 - alpha) * reference + alpha * policy`` after every other step, on the weights that the
policy has then: those of the run that was stopped up to its checkpoint, and those of the resumed run after it. Losses
and accumulated gradients of DPO are compared with the formula of the paper (arXiv:2305.18290) with this reference.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.dpo_steps import BETA, MicroBatch, sigmoid_loss
from tiny.grpo_steps import judged_steps
from tiny.steps import FormulaSteps

OVERLAYS = ()
PARITY = False
VARIANTS = {"lora": "TRL refuses sync_ref_model with an adapter, or has no reference model to move"}
EQUIVALENT = {
    "_reference: `return {f'reference.{name}': parameter for name, parameter in "
    "callback.ref_model.named_parameters()}` detached": "the values are copied into the same memory, without a gradient"
}

STEPS, STOPS, SYNC_STEPS, ALPHA = 6, (1, 3, 4), 2, 0.6
METHODS = ("DPO", "KTO", "GRPO", "RLOO")
FILE = "trl_hotfix_reference.safetensors"

Weights = dict[str, Any]


@dataclass
class Run:
    """The weights of policy and reference before the first step and after each, and what a formula gives for DPO."""

    policy: list[Weights] = field(default_factory=list)
    reference: list[Weights] = field(default_factory=list)
    steps: FormulaSteps = field(default_factory=FormulaSteps)
    warnings: list[str] = field(default_factory=list)


def train() -> tiny.TrainingResult:
    outcomes, formula = [], None
    for method in _methods():
        with tempfile.TemporaryDirectory() as folder:
            whole = _run(method, folder)
            assert not whole.warnings, whole.warnings
            assert _distance(whole.reference, _moved(whole.policy, whole.reference[0])) < 1e-6
            for stop in (3, 4) if method == "DPO" else (3,):
                resumed = _run(method, folder, stop, whole=whole)
                outcomes.append(_judged(whole, resumed, stop))
            if method == "DPO":
                formula = resumed
                outcomes += [judged_steps(resumed.steps), _resumed_elsewhere(whole, folder)]
                _without_reference(whole, folder, is_fixed=outcomes[0].verdict is Verdict.FIXED)
    outcomes.append(_with_alpha_of_one())
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    result = formula.steps.result
    return tiny.TrainingResult(outcomes[0], result.loss, result.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train without a stop, resume before the reference has moved, and from a checkpoint that has no reference."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _run("DPO", folder)
        runs = {"whole": whole, "before": _run("DPO", folder, 1, whole=whole)}
        for stop in (1, 3):
            Path(folder, f"checkpoint-{stop}", FILE).unlink(missing_ok=True)
            runs[f"without {stop}"] = _run("DPO", folder, stop, whole=whole)
    assert [len(run.warnings) for run in (runs["before"], runs["without 1"])] == [0, 0]
    values = {
        f"{name}.{kind}.{key}": value
        for name, run in runs.items()
        for kind, part in (
            ("", run.steps.result.gradients),
            ("reference", run.reference[-1]),
            ("policy", run.policy[-1]),
        )
        for key, value in part.items()
    }
    return tiny.TrainingResult(absent("there is no reference to go on with"), whole.steps.result.loss, values)


def _methods() -> list[str]:
    """Return the methods of this release that can move the reference."""
    configs = {method: tiny.classes(method)[1] for method in METHODS}
    return [
        method
        for method, config_class in configs.items()
        if config_class is not None and "sync_ref_model" in {field.name for field in fields(config_class)}
    ]


def _judged(whole: Run, resumed: Run, stop: int, alpha: float = ALPHA) -> Any:
    """Judge the reference of a run that was resumed after the step ``stop``."""
    initial = whole.reference[0]
    right = _moved(resumed.policy, _moved(whole.policy[: stop + 1], initial, alpha=alpha)[-1], stop, alpha)
    wrong = _moved(resumed.policy, initial, stop, alpha)
    measured, by_formula, by_bug = (
        max(float((value - initial[name]).abs().max()) for name, value in references[0].items())
        for references in (resumed.reference, right, wrong)
    )
    outcome = judge(measured, right=by_formula, wrong=by_bug, stop=stop)
    is_fixed = outcome.verdict is Verdict.FIXED
    assert _distance(resumed.reference, right if is_fixed else wrong) < 1e-6
    assert not resumed.warnings, resumed.warnings
    return outcome


def _resumed_elsewhere(whole: Run, folder: str) -> Any:
    """Judge a run that goes on in another folder, and is told the checkpoint in its arguments too."""
    checkpoint = f"{folder}/checkpoint-3"
    with tempfile.TemporaryDirectory() as elsewhere:
        resumed = _run("DPO", elsewhere, 3, whole=whole, checkpoint=checkpoint, resume_from_checkpoint=checkpoint)
    return _judged(whole, resumed, 3)


def _without_reference(whole: Run, folder: str, *, is_fixed: bool) -> None:
    """Check that a checkpoint that was written without the patch is gone on from as without it, with a warning."""
    Path(folder, "checkpoint-3", FILE).unlink(missing_ok=True)
    without = _run("DPO", folder, 3, whole=whole)
    assert _distance(without.reference, _moved(without.policy, whole.reference[0], 3)) < 1e-6
    assert len(without.warnings) == is_fixed, without.warnings


def _with_alpha_of_one() -> Any:
    """Judge a run in which the reference becomes the policy, resumed after a step that synchronizes."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _run("DPO", folder, alpha=1.0)
        # This follows from the policy, as in a checkpoint that was written without the patch.
        Path(folder, "checkpoint-4", FILE).unlink(missing_ok=True)
        resumed = _run("DPO", folder, 4, whole=whole, alpha=1.0)
        return _judged(whole, resumed, 4, 1.0)


def _moved(policy: list[Weights], reference: Weights, begin: int = 0, alpha: float = ALPHA) -> list[Weights]:
    """Return the reference before the first step of ``policy`` and after each. ``begin`` steps were taken before."""
    references = [reference]
    for step, weights in enumerate(policy[1:], begin + 1):
        reference = references[-1]
        if step % SYNC_STEPS == 0:
            reference = {name: (1 - alpha) * value + alpha * weights[name] for name, value in reference.items()}
        references.append(reference)
    return references


def _distance(one: list[Weights], other: list[Weights]) -> float:
    return max(
        float((value - expected[name]).abs().max())
        for weights, expected in zip(one, other, strict=True)
        for name, value in weights.items()
    )


def _copied(model: Any) -> Weights:
    return {name.removeprefix("_orig_mod."): parameter.detach().clone() for name, parameter in model.named_parameters()}


def _run(
    method: str,
    folder: str,
    stop: int = 0,
    *,
    whole: Run | None = None,
    checkpoint: str | None = None,
    alpha: float = ALPHA,
    **settings: Any,
) -> Run:
    """Train steps of two micro-batches, two of them in an epoch. A run that is not resumed saves at each stop.

    ``whole`` is the run whose checkpoint at ``stop`` is gone on from.
    """
    from transformers import TrainerCallback

    run = Run()

    class Recorder(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
            # transformers calls back before an optimizer step from 4.46 on only.
            hooked = getattr(optimizer, "optimizer", optimizer)
            trainable = dict(trainer.model.named_parameters())
            hooked.register_step_pre_hook(lambda *_: run.steps.end_step(trainable))
            self.record()

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step in STOPS and not stop
            self.record()

        def record(self) -> None:
            run.policy.append(_copied(trainer.model))
            run.reference.append(_copied(trainer.ref_model))

    settings |= {"output_dir": folder, "max_steps": STEPS, "gradient_accumulation_steps": 2, "learning_rate": 1e-2}
    settings |= {"sync_ref_model": True, "ref_model_sync_steps": SYNC_STEPS, "ref_model_mixup_alpha": alpha}
    with tempfile.TemporaryDirectory() as models:
        trainer = (
            _dpo(models, run, whole, stop, alpha, settings) if method == "DPO" else _other(method, models, settings)
        )
        # It comes after TRL's callback, which moves the reference.
        trainer.add_callback(Recorder())
        if stop:
            checkpoint = checkpoint or f"{folder}/checkpoint-{stop}"
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            Path(checkpoint, "rng_state.pth").unlink(missing_ok=True)
        _, run.warnings = tiny.warnings_of(lambda: trainer.train(resume_from_checkpoint=checkpoint))
    return run


def _dpo(models: str, run: Run, whole: Run | None, stop: int, alpha: float, settings: dict[str, Any]) -> Any:
    """Return a trainer beside which the losses by the right reference and by the wrong one are computed."""
    import torch
    from trl import DPOConfig, DPOTrainer

    method = "get_batch_loss_metrics" if hasattr(DPOTrainer, "get_batch_loss_metrics") else "compute_loss"
    references = {name: tiny.llama(models, seed=1) for name in ("right", "wrong")}

    def recorded(self: Any, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        batch = {name: value.clone() for name, value in inputs.items() if hasattr(value, "clone")}
        initial = whole.reference[0] if whole else run.reference[0]
        before = _moved(whole.policy[: stop + 1], initial, alpha=alpha)[-1] if whole else initial
        with torch.enable_grad():
            of_policy = tiny.preference_log_probs(model, batch, differentiable=True)
            losses = {}
            for name, first in (("right", before), ("wrong", initial)):
                references[name].load_state_dict(_moved(run.policy, first, stop, alpha)[-1], strict=False)
                losses[name] = sigmoid_loss(of_policy, tiny.preference_log_probs(references[name], batch))
        run.steps.add(losses, dict(self.model.named_parameters()))
        result = getattr(super(Recorder, self), method)(model, inputs, *args, **kwargs)
        loss = result[0] if isinstance(result, tuple) else result
        values = {name: float(value.detach()) for name, value in losses.items()}
        run.steps.micro_batches.append(MicroBatch(batch, True, float(loss.detach()), values, 0))
        return result

    Recorder = type("Recorder", (DPOTrainer,), {method: recorded})
    words = tiny.tokenizer()
    # 0.9.6 needs this token and puts it before every prompt; later releases do so if it is not there yet.
    words.bos_token = "<unk>"
    data = preferences_of_several_lengths().map(lambda row: {"prompt": f"<unk> {row['prompt']}"})
    trainer = tiny.trainer(
        Recorder,
        model=tiny.llama(models, seed=0),
        ref_model=tiny.llama(models, seed=1),
        args=tiny.config(DPOConfig, max_length=32, max_prompt_length=16, beta=BETA, **settings),
        train_dataset=data,
        tokenizer=words,
    )
    run.steps.measure_factor(trainer)
    return trainer


def _other(method: str, models: str, settings: dict[str, Any]) -> Any:
    trainer_class, config_class = tiny.classes(method)
    if method == "KTO":
        return tiny.trainer(
            trainer_class,
            model=tiny.llama(models, seed=0),
            ref_model=tiny.llama(models, seed=1),
            args=tiny.config(config_class, max_length=16, max_prompt_length=8, **settings),
            train_dataset=tiny.labelled(preferences_of_several_lengths().select(range(4))),
            tokenizer=tiny.tokenizer(),
        )
    # The policy has moved when the reference does.
    return tiny.grpo(trainer_class, tiny.llama(models, seed=0), config_class, beta=0.04, num_iterations=1, **settings)
