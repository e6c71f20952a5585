"""The proof: a GRPO and an RLOO run of two epochs that stops in the second and is resumed from its checkpoint.

What is right is the run that was never stopped: its prompts, and the loss and the gradients of the first step after.
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
"""An epoch has 8: one prompt a step."""


def trained(method: str, *, stopped: int = 0, steps: int = STEPS, **settings: Any) -> dict[int, Any]:
    """Prompts, loss and gradients of each step, by its number; in two parts if it is ``stopped`` after so many."""
    import trl

    seen: dict[int, Any] = {}

    class Measured(getattr(trl, f"{method}Trainer")):
        def _prepare_inputs(self, inputs: Any) -> Any:
            now = {"prompts": [row["prompt"] for row in inputs], "gradients": tiny.FirstStep(self.model).gradients}
            seen[self.state.global_step] = now
            return super()._prepare_inputs(inputs)

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            seen[self.state.global_step]["loss"] = float(loss.detach())
            return loss

    with tempfile.TemporaryDirectory() as folder:

        def part(**its: Any) -> Any:
            return tiny.grpo(
                Measured,
                tiny.llama(folder, seed=0),
                getattr(trl, f"{method}Config"),
                **{"num_iterations": 1, "output_dir": folder, "max_steps": steps, "beta": 0.04, **settings, **its},
            )

        if not stopped:
            part().train()
            return seen
        part(max_steps=stopped, save_strategy="steps", save_steps=stopped).train()
        checkpoint = Path(folder, f"checkpoint-{stopped}")
        # Old releases of transformers cannot read theirs with a torch as new as the bench's; nothing is random here.
        (checkpoint / "rng_state.pth").unlink()
        part().train(resume_from_checkpoint=str(checkpoint))
    return seen


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
        whole, resumed = trained(method), trained(method, stopped=STOPPED)
        first, second = ([whole[step]["prompts"] for step in range(begin, begin + 8)] for begin in (0, 8))
        if sorted(first) != sorted(second) or first == second:
            raise AssertionError(f"these are no two orders of the same prompts: {first}, {second}")
        after = range(STOPPED, STEPS)
        right += len(after)
        # Both orders may have the same prompt in the same place.
        wrong += sum(whole[step - 8]["prompts"] == whole[step]["prompts"] for step in after)
        measured += sum(resumed[step]["prompts"] == whole[step]["prompts"] for step in after)
        its, as_if = resumed[STOPPED], whole[STOPPED]
        off = max(float((its["gradients"][name] - each).abs().max()) for name, each in as_if["gradients"].items())
        if its["prompts"] == as_if["prompts"] and max(off, abs(its["loss"] - as_if["loss"])) > 1e-6:
            raise AssertionError(f"{method}: the prompts are those of the run that was not stopped, the step is not")
        gradients |= {f"{method}.{name}": each for name, each in its["gradients"].items()}
    return tiny.TrainingResult(judge(measured, right=right, wrong=wrong, steps=right), its["loss"], gradients)


def unaffected() -> tiny.TrainingResult:
    """Two epochs without a stop, a run that is resumed in its first epoch, and data that are not shuffled."""
    runs = {
        "whole": trained("GRPO", steps=9),
        "first epoch": trained("GRPO", stopped=2, steps=4),
        "in order": trained("GRPO", steps=2, shuffle_dataset=False),
    }
    last = {name: seen[max(seen)] for name, seen in runs.items()}
    gradients = {f"{run}.{name}": its for run, step in last.items() for name, its in step["gradients"].items()}
    loss = sum(step["loss"] for step in last.values())
    return tiny.TrainingResult(absent("no run is resumed after its first epoch"), loss, gradients)
