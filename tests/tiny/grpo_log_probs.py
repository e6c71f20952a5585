"""Optimizer steps of the real GRPOTrainer of 0.14 to 0.16, and beside them the formula with log-probs of each proof.

0.14.0 generates in the method that computes the loss, so the sequences are recorded where the model draws them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from . import grpo_steps
from .grpo_runs import grpo_of_one_length
from .measuring import TrainingResult
from .models import llama
from .steps import FormulaSteps

GROUP, LENGTH = 4, 8
"""Completions of a prompt in ``grpo_of_one_length``, and tokens of each, with its end of sequence."""

LogProbs = Callable[[Any, Any, int], Mapping[str, Sequence[Any]]]
"""``log_probs(model, sequences, number)`` gives those of each completion in a micro-batch, by name."""


def generates_in_the_loss() -> bool:
    """Tell whether it is 0.14.0, which draws a group of completions for each row. Later releases draw one."""
    from trl import GRPOTrainer

    return not hasattr(GRPOTrainer, "_get_per_token_logps")


def recorded_steps(
    trainer_class: Any,
    drawn: Callable[[Any, int], Any],
    log_probs: LogProbs,
    peft_config: Any = None,
    *,
    evaluates: bool = False,
    **settings: Any,
) -> FormulaSteps:
    """Train two optimizer steps of two micro-batches, after the policy has moved away from its reference.

    ``drawn(sequences, number)`` gives the sequences of the micro-batch of this number, in place of those that
    ``grpo_of_one_length`` draws. With ``evaluates`` an evaluation follows, except in 0.14.0, which cannot evaluate.
    """
    import torch
    from transformers import TrainerCallback

    run = FormulaSteps()
    sequences: list[Any] = []

    class RecordSteps(trainer_class):  # type: ignore[misc]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            of_policy = log_probs(policy, sequences[-1], len(run.micro_batches))
            with torch.no_grad():
                of_reference = log_probs(reference, sequences[-1], len(run.micro_batches))
            expected, expected_kl = {}, {}
            for name, current in of_policy.items():
                expected[name], expected_kl[name] = _loss_and_kl(current, of_reference[name], self.beta)
            if torch.is_grad_enabled():
                run.add(expected, trainable)
            run.micro_batches.append(
                grpo_steps.MicroBatch(
                    {},
                    self.model.training,
                    float(loss.detach()),
                    _newest_kl(self),
                    {name: float(value.detach()) for name, value in expected.items()},
                    expected_kl,
                )
            )
            return loss

    class RecordGradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            run.end_step(trainable)

    with tempfile.TemporaryDirectory() as folder:
        policy, reference = (llama(folder, seed=0) for _ in range(2))
        for model in (policy, reference):
            # Scaled, the head gives probabilities that differ, and the first norm no gradient in which rounding shows.
            model.get_output_embeddings().weight.data *= 5
            model.get_input_embeddings().weight.data *= 50
        defaults = {"per_device_train_batch_size": 1 if generates_in_the_loss() else GROUP, "optim": "sgd"}
        defaults |= {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.1}
        run.trainer = trainer = grpo_of_one_length(
            RecordSteps, policy, peft_config, per_device_eval_batch_size=GROUP, **{**defaults, **settings}
        )
        policy = trainer.model
        generate = policy.generate

        def generate_and_record(*args: Any, **kwargs: Any) -> Any:
            sequences.append(drawn(generate(*args, **kwargs), len(sequences)))
            return sequences[-1]

        policy.generate = generate_and_record
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        _move(trainable, 1.0 if hasattr(policy, "peft_config") else 0.03)
        run.measure_factor(trainer)
        if evaluates and not generates_in_the_loss():
            # An evaluation within the training is known as one in every release. The constructor wants both at once.
            trainer.eval_dataset = trainer.train_dataset.select(range(1))
            trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
        trainer.add_callback(RecordGradients)
        trainer.train()
    evaluations = [False] * (evaluates and not generates_in_the_loss())
    if [micro_batch.is_training for micro_batch in run.micro_batches] != [True] * 4 + evaluations:
        raise AssertionError(f"expected four micro-batches and {len(evaluations)} evaluations: {run.micro_batches}")
    return run


def judged_runs(runs: Mapping[str, FormulaSteps]) -> TrainingResult:
    """Judge losses, gradients and ``kl`` of these runs by the formulas ``right`` and ``wrong``: all are of one kind."""
    from trl_hotfix.authoring import judge

    outcomes = [grpo_steps.judged_steps(run) for run in runs.values()]
    outcomes += [judge(part.kl, **part.expected_kl) for run in runs.values() for part in run.micro_batches]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"losses and kl are not all of one kind: {outcomes}")
    return grpo_steps.several_runs(runs, outcomes[0])


def _move(trainable: Mapping[str, Any], distance: float) -> None:
    import torch

    with torch.no_grad():
        for number, parameter in enumerate(trainable.values()):
            parameter.add_(distance * torch.cos(number + torch.arange(parameter.numel())).reshape(parameter.shape))


def _newest_kl(trainer: Any) -> float:
    """Return what was logged last. From 0.16 on the metrics are kept by mode."""
    metrics = trainer._metrics.get("train" if trainer.model.training else "eval", trainer._metrics)
    return float(metrics["kl"][-1])


def _loss_and_kl(policy: Sequence[Any], reference: Sequence[Any], beta: float) -> tuple[Any, float]:
    """Return both by the formula from log-probs, as means over sequences of means over their tokens.

    The rewards of a group are equidistant; with 1e-4 their standard deviation is 1.
    """
    import torch

    places = torch.arange(GROUP, dtype=torch.float32)
    advantages = (1 - 1e-4) * (places - places.mean()) / places.std()
    losses, kls = [], []
    for row, (current, before) in enumerate(zip(policy, reference, strict=True)):
        log_ratio = before - current
        kl = torch.exp(log_ratio) - log_ratio - 1
        ratio = torch.exp(current - current.detach())
        losses.append((beta * kl - ratio * advantages[row % GROUP]).mean())
        kls.append(kl.detach().mean())
    return torch.stack(losses).mean(), float(torch.stack(kls).mean())
