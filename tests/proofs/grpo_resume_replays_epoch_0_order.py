"""The proof: a GRPO and an RLOO run of two epochs that stops in the second and is resumed from its checkpoint.

The expected result is the run without a stop: its prompts, and the loss and the gradients of the first step after the
stop.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = "The order of the prompts does not depend on the model, nor on how it is trained."

STEPS, STOPPED = 16, 10
"""An epoch has 8 steps of one prompt each."""


def trained(method: str, *, stopped: int = 0, steps: int = STEPS, **settings: Any) -> dict[int, Any]:
    """Return the prompts, the loss and the gradients of each step, by its number.

    With ``stopped``, the run ends after so many steps and is resumed from its checkpoint.
    """
    import trl

    recorded: dict[int, Any] = {}

    class StepRecorder(getattr(trl, f"{method}Trainer")):
        def _prepare_inputs(self, inputs: Any) -> Any:
            prompts = [row["prompt"] for row in inputs]
            gradients = tiny.FirstStep(self.model).gradients
            recorded[self.state.global_step] = {"prompts": prompts, "gradients": gradients}
            return super()._prepare_inputs(inputs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            recorded[self.state.global_step]["loss"] = float(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        usual = {"num_iterations": 1, "output_dir": folder, "max_steps": steps, "beta": 0.04, **settings}

        def new_trainer(**overrides: Any) -> Any:
            policy = tiny.llama(folder, seed=0)
            return tiny.grpo(StepRecorder, policy, getattr(trl, f"{method}Config"), **{**usual, **overrides})

        if not stopped:
            new_trainer().train()
            return recorded
        new_trainer(max_steps=stopped, save_strategy="steps", save_steps=stopped).train()
        checkpoint = Path(folder, f"checkpoint-{stopped}")
        # Old releases of transformers cannot read this file with a torch as new as the bench's; nothing is random here.
        (checkpoint / "rng_state.pth").unlink()
        new_trainer().train(resume_from_checkpoint=str(checkpoint))
    return recorded


def train() -> tiny.TrainingResult:
    import trl

    methods = [
        name for name in ("GRPO", "RLOO") if "_get_train_sampler" in vars(getattr(trl, f"{name}Trainer", object))
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release leaves the sampler to transformers"))
    right = wrong = measured = 0
    gradients: dict[str, Any] = {}
    for method in methods:
        uninterrupted, resumed = trained(method), trained(method, stopped=STOPPED)
        first, second = ([uninterrupted[step]["prompts"] for step in range(begin, begin + 8)] for begin in (0, 8))
        if sorted(first) != sorted(second) or first == second:
            raise AssertionError(f"these are no two orders of the same prompts: {first}, {second}")
        resumed_steps = range(STOPPED, STEPS)
        right += len(resumed_steps)
        # Both orders may have the same prompt in the same place.
        wrong += sum(uninterrupted[step - 8]["prompts"] == uninterrupted[step]["prompts"] for step in resumed_steps)
        measured += sum(resumed[step]["prompts"] == uninterrupted[step]["prompts"] for step in resumed_steps)
        first_resumed, expected = resumed[STOPPED], uninterrupted[STOPPED]
        difference = max(
            float((first_resumed["gradients"][name] - gradient).abs().max())
            for name, gradient in expected["gradients"].items()
        )
        difference = max(difference, abs(first_resumed["loss"] - expected["loss"]))
        if first_resumed["prompts"] == expected["prompts"] and difference > 1e-6:
            raise AssertionError(f"{method}: the prompts are those of the run that was not stopped, the step is not")
        gradients |= {f"{method}.{name}": gradient for name, gradient in first_resumed["gradients"].items()}
    outcome = judge(measured, right=right, wrong=wrong, steps=right)
    return tiny.TrainingResult(outcome, first_resumed["loss"], gradients)


def unaffected() -> tiny.TrainingResult:
    """Train two epochs without a stop, resume a run in its first epoch, and train on data that are not shuffled."""
    runs = {
        "whole": trained("GRPO", steps=9),
        "first epoch": trained("GRPO", stopped=2, steps=4),
        "in order": trained("GRPO", steps=2, shuffle_dataset=False),
    }
    last_steps = {name: recorded[max(recorded)] for name, recorded in runs.items()}
    gradients = {
        f"{run}.{name}": gradient for run, step in last_steps.items() for name, gradient in step["gradients"].items()
    }
    loss = sum(step["loss"] for step in last_steps.values())
    return tiny.TrainingResult(absent("no run is resumed after its first epoch"), loss, gradients)
