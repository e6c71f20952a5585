"""Train two steps of two micro-batches with the real GRPO and RLOO trainers and a new adapter on a quantised model.

The model is a stand-in that is only marked as quantised, so that the release prepares it as such; its weights are
floats. So the expected losses, gradients and weights are those of the same run without the mark.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True
VARIANTS = {
    "compiled": "Unpatched, the constructor fails before anything is compiled.",
    "full": "What fails is the preparing of an adapter.",
}


STEPS, MICRO_BATCHES = 2, 2


def train() -> tiny.TrainingResult:
    import trl

    # Until 0.22.0 RLOO has a training loop of its own.
    methods = ["GRPO", *(["RLOO"] if hasattr(trl.RLOOTrainer, "_generate_and_score_completions") else [])]
    try:
        runs = {method: _run(method, quantised=True) for method in methods}
    except ValueError as error:
        if "can not be both configured" not in str(error):
            raise
        return tiny.TrainingResult(judge(0, right=8, wrong=0, error=f"ValueError: {error}"))
    for method, run in runs.items():
        _compare(method, run, _run(method, quantised=False))
    moving = [name for name, gradient in runs["GRPO"].steps[0].gradients.items() if gradient.abs().max() > 1e-9]
    return tiny.result_of_runs(runs, judge(len(moving), right=8, wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train an adapter on a model that is not quantised."""
    return tiny.result_of_runs({"GRPO": _run("GRPO", quantised=False)}, absent("the arguments are not copied"))


def _losses(trainer: Any) -> list[float]:
    return [micro_batch.loss for step in trainer.steps for micro_batch in step.micro_batches]


def _compare(method: str, run: Any, expected: Any) -> None:
    """Check losses, gradients and the weights in the end."""
    if len(run.steps) != STEPS or len(_losses(run)) != STEPS * MICRO_BATCHES:
        raise AssertionError(f"{method}: expected {STEPS} steps of {MICRO_BATCHES} micro-batches: {run.steps}")
    differences = [abs(loss - right) for loss, right in zip(_losses(run), _losses(expected), strict=True)]
    differences += [step.difference(right.gradients) for step, right in zip(run.steps, expected.steps, strict=True)]
    weights, right_weights = run.model.state_dict(), expected.model.state_dict()
    differences += [float((weights[name] - value).abs().max()) for name, value in right_weights.items()]
    if max(differences) > 1e-6:
        raise AssertionError(f"{method}: losses, gradients and weights differ by up to {max(differences)}")


def _run(method: str, *, quantised: bool) -> Any:
    import torch
    import trl

    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        torch.manual_seed(0)
        trainer = tiny.grpo(
            tiny.stepwise(getattr(trl, f"{method}Trainer")),
            tiny.quantised(policy) if quantised else policy,
            getattr(trl, f"{method}Config"),
            prompts=["w1 w2 w3"] * 8,
            peft_config=tiny.lora(),
            gradient_checkpointing=True,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=STEPS,
            num_iterations=1,
            loss_type="grpo",
        )
        tiny.set_adapters(trainer.model)
        trainer.train()
    return trainer
