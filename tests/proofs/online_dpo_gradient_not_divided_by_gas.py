"""The proof: one optimizer step of two micro-batches with the real trainers of online DPO, XPO and Nash-MD.

The gradient of the first micro-batch is compared with half of that of its loss: OnlineDPO's loss is computed without
TRL, from the formula; those of the other two, which sample, are what their own ``_compute_losses`` gives.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = {"compiled": "the proof takes two gradients of one graph, and what is compiled has given its buffers away"}

STEPS = 2
NAMES = ("OnlineDPO", "XPO", "NashMD")


def train() -> tiny.TrainingResult:
    seen = {name: _train(name, STEPS) for name in NAMES}
    verdicts = {each.outcome.verdict for each in seen.values()} - {Verdict.ABSENT}
    if len(verdicts) > 1:
        raise AssertionError(f"the trainers do not agree: {seen}")
    numbers = {name: each.outcome.to_dict() for name, each in seen.items()}
    outcome = Outcome(verdicts.pop() if verdicts else Verdict.ABSENT, numbers)
    return tiny.TrainingResult(outcome, seen["OnlineDPO"].loss, _together(seen))


def unaffected() -> tiny.TrainingResult:
    """Without accumulation, and where accelerate was told of it, so that it divides (transformers 5 tells it 1)."""
    seen = {name: _train(name, 1) for name in NAMES}
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(STEPS)
    try:
        seen["told"] = _train("OnlineDPO", STEPS, told=True)
    finally:
        del os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
    if seen["told"].outcome.verdict is Verdict.REPRODUCED:
        raise AssertionError(f"accelerate does not divide: {seen['told'].outcome}")
    return tiny.TrainingResult(
        absent("nobody accumulates, or accelerate divides"), seen["OnlineDPO"].loss, _together(seen)
    )


def _together(seen: dict[str, tiny.TrainingResult]) -> dict[str, Any]:
    return {f"{name}.{key}": it for name, each in seen.items() for key, it in each.gradients.items()}


def _train(name: str, steps: int, *, told: bool = False) -> tiny.TrainingResult:
    import torch
    import transformers
    from packaging.version import Version

    trainer_class, config_class = tiny.classes(name)
    if trainer_class is None:
        return tiny.TrainingResult(absent("this release has no such trainer"))
    if Version(transformers.__version__) < Version("4.46"):
        return tiny.TrainingResult(absent("accelerate divides"))
    expected: list[tuple[float, list[Any]]] = []

    class Measured(trainer_class):  # type: ignore[misc]
        if hasattr(trainer_class, "_compute_losses"):

            def _compute_losses(self, *args: Any, **kwargs: Any) -> Any:
                result = super()._compute_losses(*args, **kwargs)
                if not expected:
                    gradients = torch.autograd.grad(result[0], parameters, retain_graph=True)
                    expected.append((float(result[0].detach()), list(gradients)))
                    seen.gradients.clear()  # those are not the step's
                return result

    with tempfile.TemporaryDirectory() as folder:
        policy, alone = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.online_dpo(Measured, config_class, policy, gradient_accumulation_steps=steps)
        if told and trainer.accelerator.gradient_accumulation_steps == 1:
            return tiny.TrainingResult(absent("it was not told"))
        parameters = [each for each in policy.parameters() if each.requires_grad]
        if name == "OnlineDPO":
            beta, log_probs = 0.5, tiny.online_log_probs(alone, 4).sum(1)
            reference = log_probs.detach()
            margin = (log_probs - reference)[:2] - (log_probs - reference)[2:]
            loss = -torch.nn.functional.logsigmoid(beta * margin).mean()
            mine = [each for each in alone.parameters() if each.requires_grad]
            expected.append((float(loss.detach()), list(torch.autograd.grad(loss, mine))))
        seen = tiny.FirstStep(policy)
        torch.manual_seed(0)
        trainer.train()
    loss, gradients = expected[0]
    norm = float(torch.stack([each.norm() for each in gradients]).norm())
    measured = float(torch.stack([each.norm() for each in seen.gradients.values()]).norm())
    return tiny.TrainingResult(judge(measured, right=norm / steps, wrong=norm, loss=loss), loss, seen.gradients)
