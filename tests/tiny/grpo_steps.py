"""Optimizer steps of the real GRPOTrainer, and beside them what a formula gives for each of their micro-batches."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .grpo_runs import grpo
from .measuring import TrainingResult
from .models import llama
from .steps import FormulaSteps


@dataclass
class MicroBatch:
    """What ``compute_loss`` was given, returned and logged, and what each formula gives."""

    inputs: dict[str, Any]
    is_training: bool
    loss: float
    kl: float | None
    expected: dict[str, float]
    expected_kl: Mapping[str, float]


Formula = Callable[[Any, Mapping[str, Any], Any, Any], Mapping[str, Any]]
"""``formula(trainer, inputs, token_loss, mask)`` gives the losses of a micro-batch, by name."""


def grpo_steps(
    formula: Formula, kl_formula: Formula | None = None, *, whole: bool = False, moved: float = 0.0, **settings: Any
) -> FormulaSteps:
    """Train two optimizer steps of two micro-batches, then evaluate, and compute ``formula`` beside each micro-batch.

    All prompts are the same, so that their order does not matter. The policy moves by ``moved`` from its reference
    before. ``whole``: the formula is not divided by the micro-batches of a step, as some losses are from 0.22.0 on. The
    factor by which transformers multiplies a loss before it goes backward depends on its version, and is measured.
    """
    import torch
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    run = FormulaSteps()

    class RecordSteps(GRPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            inputs = dict(inputs)
            before = _logged_kl(self)
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            logged = _logged_kl(self)[len(before) :]
            log_probs, reference_log_probs = log_probs_of(policy, inputs), log_probs_of(reference, inputs).detach()
            token_loss, kl, mask = token_losses(self, inputs, log_probs, reference_log_probs)
            expected = formula(self, inputs, token_loss, mask)
            kls = kl_formula(self, inputs, kl.detach(), mask) if kl_formula else {}
            if torch.is_grad_enabled():
                divisor = round(float((next(iter(expected.values())) / loss).detach()), 4) if whole else 1
                if divisor not in (1, 2):
                    raise AssertionError(f"the loss {float(loss)} is neither the formula nor half of it: {expected}")
                run.add({name: value / divisor for name, value in expected.items()}, trainable)
            run.micro_batches.append(
                MicroBatch(
                    inputs,
                    self.model.training,
                    float(loss.detach()),
                    logged[0] if logged else None,
                    {name: float(value.detach()) for name, value in expected.items()},
                    {name: float(value) for name, value in kls.items()},
                )
            )
            return loss

    class RecordGradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.end_step(trainable)

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (llama(folder, seed=0) for _ in range(2))
        # Later releases multiply the divergence by the ratio, unless they are told not to.
        defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "optim": "sgd", "learning_rate": 0.5}
        defaults |= {"per_device_eval_batch_size": 4, "use_bias_correction_kl": False}
        trainer = grpo(RecordSteps, policy, prompts=["w1 w2 w3"] * 16, **{**defaults, **settings})
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        with torch.no_grad():
            for number, parameter in enumerate(trainable.values()):
                index = torch.arange(parameter.numel()).reshape(parameter.shape)
                parameter.add_(moved * torch.cos(number + index))
        run.measure_factor(trainer)
        # An evaluation within the training is known as one in every release. The constructor wants both at once.
        trainer.eval_dataset = trainer.train_dataset.select(range(2))
        trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
        trainer.add_callback(RecordGradients)
        trainer.train()
    return run


def log_probs_of(model: Any, inputs: Mapping[str, Any]) -> Any:
    """Return the log-probs of the completions, of shape ``(batch, completion length)``, at temperature 1."""
    import torch

    prompt, completion = inputs["prompt_ids"], inputs["completion_ids"]
    tokens = torch.cat([prompt, completion], dim=1)
    attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1)
    logits = model(input_ids=tokens, attention_mask=attention, use_cache=False).logits[:, prompt.size(1) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)


def token_losses(trainer: Any, inputs: Mapping[str, Any], log_probs: Any, reference: Any) -> tuple[Any, Any, Any]:
    """Return the loss of each token, its divergence from the reference, and the mask of the tokens that are trained on.

    DeepSeekMath (arXiv:2402.03300), equations 3 and 4, and the soft clipping of SAPO (arXiv:2511.20347).
    """
    import torch

    old = inputs.get("old_per_token_logps")
    ratio = torch.exp(log_probs - (log_probs.detach() if old is None else old))
    advantages = inputs["advantages"].unsqueeze(1)
    if getattr(trainer.args, "loss_type", "grpo") == "sapo":
        temperature = torch.where(advantages > 0, trainer.args.sapo_temperature_pos, trainer.args.sapo_temperature_neg)
        gain = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages
    else:
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    kl = torch.exp(reference - log_probs) - (reference - log_probs) - 1
    return trainer.beta * kl - gain, kl, inputs["completion_mask"]


def over_sequences(values: Any, mask: Any) -> Any:
    """Return the mean over the sequences of the mean over the tokens of each."""
    return ((values * mask).sum(1) / mask.sum(1)).mean()


def over_tokens(values: Any, mask: Any) -> Any:
    """Return the mean over the tokens of the micro-batch."""
    return (values * mask).sum() / mask.sum()


def judged_steps(run: FormulaSteps) -> Any:
    """Judge all losses and all gradients of a run by the formulas ``right`` and ``wrong``: all are of one kind."""
    import torch

    from trl_hotfix.authoring import judge
    from trl_hotfix.model import Verdict

    outcomes = []
    for micro_batch in run.micro_batches:
        right, wrong = (micro_batch.expected[name] for name in ("right", "wrong"))
        outcome = judge(micro_batch.loss, right=right, wrong=wrong, training=micro_batch.is_training)
        if abs(right - wrong) > 1e-4:
            outcomes.append(outcome)
    for step, gradients in enumerate(run.gradients):
        differences = {
            name: max(float((gradients[key] - value).abs().max()) for key, value in expected.items())
            for name, expected in run.expected[step].items()
        }
        verdicts = {"right": Verdict.FIXED, "wrong": Verdict.REPRODUCED}
        kinds = [verdicts[name] for name, difference in differences.items() if difference < 1e-5]
        if kinds != [outcomes[0].verdict]:
            raise AssertionError(f"step {step}: the gradients differ by {differences}, the losses are {outcomes}")
    if len(run.gradients) != 2 or any(not torch.any(value) for value in run.gradients[0].values()):
        raise AssertionError(f"expected the gradients of two steps: {run.gradients}")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the micro-batches are not all of one kind: {outcomes}")
    return outcomes[0]


def several_runs(runs: Mapping[str, FormulaSteps], outcome: Any) -> TrainingResult:
    """Return the gradients of several runs together, and the loss of the first."""
    results = {name: run.result for name, run in runs.items()}
    gradients = {f"{name}.{key}": value for name, result in results.items() for key, value in result.gradients.items()}
    return TrainingResult(outcome, next(iter(results.values())).loss, gradients)


def _logged_kl(trainer: Any) -> list[float]:
    """Return the values of ``kl`` that are logged. Up to 0.15 the metrics are not kept by mode."""
    by_mode = [metrics for metrics in trainer._metrics.values() if isinstance(metrics, dict)]
    return [value for metrics in (trainer._metrics, *by_mode) for value in metrics.get("kl", ())]
