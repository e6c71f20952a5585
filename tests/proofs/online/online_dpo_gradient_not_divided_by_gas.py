"""The proof: one optimizer step of two micro-batches with the real trainers of online DPO, XPO and Nash-MD.

The gradient of the first micro-batch is compared with half of the gradient of its loss. OnlineDPO's loss is computed
without TRL, from the formula; the losses of the other two, which sample, come from their own ``_compute_losses``.
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

STEPS = 2
NAMES = ("OnlineDPO", "XPO", "NashMD")


def train() -> tiny.TrainingResult:
    results = {name: _train(name, STEPS) for name in NAMES}
    verdicts = {result.outcome.verdict for result in results.values()} - {Verdict.ABSENT}
    if len(verdicts) > 1:
        raise AssertionError(f"the trainers do not agree: {results}")
    numbers = {name: result.outcome.to_dict() for name, result in results.items()}
    outcome = Outcome(verdicts.pop() if verdicts else Verdict.ABSENT, numbers)
    return tiny.TrainingResult(outcome, results["OnlineDPO"].loss, _all_gradients(results))


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation, and where accelerate knows of it and divides (transformers 5 tells it 1)."""
    results = {name: _train(name, 1) for name in NAMES}
    os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] = str(STEPS)
    try:
        results["told"] = _train("OnlineDPO", STEPS, told=True)
    finally:
        del os.environ["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"]
    if results["told"].outcome.verdict is Verdict.REPRODUCED:
        raise AssertionError(f"accelerate does not divide: {results['told'].outcome}")
    outcome = absent("nobody accumulates, or accelerate divides")
    return tiny.TrainingResult(outcome, results["OnlineDPO"].loss, _all_gradients(results))


def _all_gradients(results: dict[str, tiny.TrainingResult]) -> dict[str, Any]:
    return {
        f"{trainer}.{name}": gradient
        for trainer, result in results.items()
        for name, gradient in result.gradients.items()
    }


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

    class FirstLossRecorder(trainer_class):
        if hasattr(trainer_class, "_compute_losses"):

            def _compute_losses(self, *args: Any, **kwargs: Any) -> Any:
                result = super()._compute_losses(*args, **kwargs)
                if not expected:
                    gradients = torch.autograd.grad(result[0], policy_parameters, retain_graph=True)
                    expected.append((float(result[0].detach()), list(gradients)))
                    step.gradients.clear()  # these are not the gradients of the training step
                return result

    with tempfile.TemporaryDirectory() as folder:
        policy, untrained = (tiny.llama(folder, seed=0) for _ in range(2))
        trainer = tiny.online_dpo(FirstLossRecorder, config_class, policy, gradient_accumulation_steps=steps)
        if told and trainer.accelerator.gradient_accumulation_steps == 1:
            return tiny.TrainingResult(absent("it was not told"))
        policy_parameters = _trainable(policy)
        if name == "OnlineDPO":
            beta, log_probs = 0.5, tiny.online_log_probs(untrained, 4).sum(1)
            reference = log_probs.detach()
            margin = (log_probs - reference)[:2] - (log_probs - reference)[2:]
            loss = -torch.nn.functional.logsigmoid(beta * margin).mean()
            expected.append((float(loss.detach()), list(torch.autograd.grad(loss, _trainable(untrained)))))
        step = tiny.FirstStep(policy)
        torch.manual_seed(0)
        trainer.train()
    loss, gradients = expected[0]
    norm = float(torch.stack([gradient.norm() for gradient in gradients]).norm())
    measured = float(torch.stack([gradient.norm() for gradient in step.gradients.values()]).norm())
    return tiny.TrainingResult(judge(measured, right=norm / steps, wrong=norm, loss=loss), loss, step.gradients)


def _trainable(model: Any) -> list[Any]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
