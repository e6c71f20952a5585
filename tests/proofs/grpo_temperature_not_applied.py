"""Train two steps of two micro-batches with the real GRPOTrainer, and evaluate: all weights, and an adapter.

Losses, accumulated gradients and the ``kl`` metric are compared with the paper (arXiv:2402.03300, equations 3 and 4).
All completions are equally long, so that the mean over sequences is the mean over tokens, which 0.16.0 takes.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import grpo_steps

OVERLAYS = ()
PARITY = True

ID = "grpo-temperature-not-applied"
LENGTH = 8
"""Of each completion, with its end of sequence."""


def train() -> tiny.TrainingResult:
    import trl
    from packaging.version import Version

    if not Version("0.14") <= Version(trl.__version__) < Version("0.17"):
        return tiny.TrainingResult(absent("it has no GRPO, or divides the logits since 0.16.0"))
    runs = {"full": _run(0.5), "adapter": _run(0.7, tiny.lora())}
    outcomes = [grpo_steps.judged_steps(run) for run in runs.values()]
    for run in runs.values():
        for micro_batch in run.micro_batches:
            outcomes.append(judge(micro_batch.kl, **micro_batch.expected_kl))
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"losses and kl are not all of one kind: {outcomes}")
    return grpo_steps.several_runs(runs, outcomes[0])


def unaffected() -> tiny.TrainingResult:
    """Train at temperature 1, without one, and at 0, where nothing is divided."""
    runs = {str(temperature): _run(temperature) for temperature in (1.0, None, 0.0)}
    for name, run in runs.items():
        for target in ("compute_loss", "_get_per_token_logps"):
            if tiny.acts(ID, f"trl.trainer.grpo_trainer:GRPOTrainer.{target}", run.trainer):
                raise AssertionError(f"the wrapper acts at temperature {name}")
    return grpo_steps.several_runs(runs, absent("nothing is divided"))


def _run(temperature: float | None, peft_config: Any = None) -> tiny.FormulaSteps:
    """Train and evaluate. Each micro-batch has other completions than the one before.

    The policy moves away from its reference before.
    """
    import torch
    from transformers import TrainerCallback
    from trl import GRPOTrainer

    run = tiny.FormulaSteps()
    sequences: list[Any] = []

    class RecordSteps(GRPOTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, *args, **kwargs)
            expected, expected_kl = {}, {}
            for name, divisor in (("right", temperature or 1.0), ("wrong", 1.0)):
                expected[name], kl = _loss_and_kl(policy, reference, sequences[-1], divisor, self.beta)
                expected_kl[name] = float(kl.detach())
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
        policy, reference = (tiny.llama(folder, seed=0) for _ in range(2))
        for model in (policy, reference):
            # Scaled, the head gives probabilities that differ, and the first norm no gradient in which rounding shows.
            model.get_output_embeddings().weight.data *= 5
            model.get_input_embeddings().weight.data *= 50
        # 0.14.0 has four completions of each prompt of the batch, later releases four in a batch.
        in_the_loss = not hasattr(GRPOTrainer, "_get_per_token_logps")
        run.trainer = trainer = tiny.grpo_of_one_length(
            RecordSteps,
            policy,
            peft_config,
            per_device_train_batch_size=1 if in_the_loss else 4,
            per_device_eval_batch_size=4,
            gradient_accumulation_steps=2,
            max_steps=2,
            optim="sgd",
            learning_rate=0.1,
            temperature=temperature,
        )
        policy = trainer.model
        moved = 1.0 if hasattr(policy, "peft_config") else 0.03
        generate = policy.generate

        def generate_others(*args: Any, **kwargs: Any) -> Any:
            ids = generate(*args, **kwargs)
            ids[:, -LENGTH:-1] += len(sequences) % 4
            sequences.append(ids)
            return ids

        policy.generate = generate_others
        trainable = {name: value for name, value in policy.named_parameters() if value.requires_grad}
        with torch.no_grad():
            for number, parameter in enumerate(trainable.values()):
                parameter.add_(moved * torch.cos(number + torch.arange(parameter.numel())).reshape(parameter.shape))
        run.measure_factor(trainer)
        if not in_the_loss:  # 0.14.0 cannot evaluate.
            # An evaluation within the training is known as one in every release. The constructor wants both at once.
            trainer.eval_dataset = trainer.train_dataset.select(range(1))
            trainer.args.eval_strategy, trainer.args.eval_steps = "steps", 2
        trainer.add_callback(RecordGradients)
        trainer.train()
    if [micro_batch.is_training for micro_batch in run.micro_batches] != [True] * 4 + [False] * (not in_the_loss):
        raise AssertionError(f"expected four micro-batches and an evaluation: {run.micro_batches}")
    return run


def _newest_kl(trainer: Any) -> float:
    """Return what was logged last. From 0.16 on the metrics are kept by mode."""
    metrics = trainer._metrics.get("train" if trainer.model.training else "eval", trainer._metrics)
    return float(metrics["kl"][-1])


def _loss_and_kl(policy: Any, reference: Any, sequences: Any, temperature: float, beta: float) -> tuple[Any, Any]:
    """Return both by the formula. The rewards of a group are equidistant; with 1e-4 their standard deviation is 1."""
    import torch

    def log_probs(model: Any) -> Any:
        logits = model(input_ids=sequences, use_cache=False).logits[:, -LENGTH - 1 : -1] / temperature
        return logits.log_softmax(-1).gather(-1, sequences[:, -LENGTH:, None])[..., 0]

    current = log_probs(policy)
    log_ratio = log_probs(reference).detach() - current
    kl = torch.exp(log_ratio) - log_ratio - 1
    places = torch.arange(len(sequences), dtype=torch.float32)
    advantages = (1 - 1e-4) * (places - places.mean()) / places.std()
    ratio = torch.exp(current - current.detach())
    return (beta * kl - ratio * advantages[:, None]).mean(), kl.mean()
