"""Train two steps of two micro-batches with the real GRPO, RLOO and OnlineDPO trainers, bf16=True and continuous
batching, and evaluate.

Continuous batching needs a GPU, so a substitute for ``generate_batch`` returns the completions of the padded
``generate``. The expected result is a run with the padded ``generate``: it has the same losses, the same gradients in
both steps, the same evaluation and the same weights in the end. A model in bfloat16, whose rotary frequencies are in
float32 as when it is loaded so, has the same frequencies, too.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False

OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")
STEPS, MICRO_BATCHES = 2, 2
EOS = 1


@dataclass
class Run:
    """Losses, gradients by step, weights and buffers in the end, and the bits of the weights that generated."""

    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    generation_bits: set[int] = field(default_factory=set)


def train() -> tiny.TrainingResult:
    import torch

    methods = [method for method in ("GRPO", "RLOO", "OnlineDPO") if _has_batching(method)]
    if not methods:
        return tiny.TrainingResult(absent("this release has no continuous batching"))
    kept = trained = 0
    runs = {}
    cases = [(method, method, None) for method in methods]
    for name, method, dtype in [*cases, (f"{methods[0]} in bfloat16", methods[0], torch.bfloat16)]:
        runs[name] = batched = _run(method, batching=True, dtype=dtype)
        padded = _run(method, batching=False, dtype=dtype)
        if batched.generation_bits != {16}:
            raise AssertionError(f"{name} generated with {batched.generation_bits} bits")
        trained += sum(weight.dtype == torch.float32 for weight in padded.weights.values())
        full_precision = [name for name, weight in batched.weights.items() if weight.dtype == torch.float32]
        kept += len(full_precision)
        if not full_precision:
            continue
        different = [
            key
            for expected, measured in ((padded.weights, batched.weights), (padded.gradients, batched.gradients))
            for key in expected
            if not torch.equal(measured[key], expected[key])
        ]
        if different or batched.losses != padded.losses:
            raise AssertionError(f"{name}: not as with the padded generate: {different}, {batched.losses}")
    return _result(runs, judge(kept, right=trained, wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Train with the padded ``generate``, without mixed precision, and with all of a model cast from the beginning."""
    import torch

    runs = {
        "padded": _run("GRPO", batching=False),
        "float32": _run("GRPO", batching=True, bf16=False),
        "bfloat16": _run("GRPO", batching=True, dtype=torch.bfloat16, whole=True),
    }
    return _result(runs, absent("nothing is cast"))


def _has_batching(method: str) -> bool:
    fields = getattr(tiny.classes(method)[1], "__dataclass_fields__", {})
    return any(name in fields for name in OPTIONS)


def _result(runs: dict[str, Run], outcome: Any) -> tiny.TrainingResult:
    gradients = {f"{name}.{key}": gradient for name, run in runs.items() for key, gradient in run.gradients.items()}
    return tiny.TrainingResult(outcome, sum(sum(run.losses) for run in runs.values()), gradients)


def _run(method: str, *, batching: bool, bf16: bool = True, dtype: Any = None, whole: bool = False) -> Run:
    """Train with weights of this type, and with ``whole`` with buffers of it, too."""
    import torch
    from transformers import TrainerCallback

    run = Run()
    trainer_class, config_class = tiny.classes(method)

    class Recorder(trainer_class):  # type: ignore[misc, valid-type]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            run.losses.append(float(loss))
            return loss

    class Gradients(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            gradients = tiny.gradients_of(trainer.model)
            run.gradients.update({f"{state.global_step}.{name}": value for name, value in gradients.items()})

    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "learning_rate": 1e-6,
        "bf16": bf16,
    }
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        if whole:
            policy.to(dtype)
        elif dtype is not None:
            for weight in policy.parameters():
                weight.data = weight.data.to(dtype)
        torch.manual_seed(0)
        if method == "OnlineDPO":
            trainer = tiny.online_dpo(Recorder, config_class, policy, **settings)
            # Releases up to 0.23 ask for it, and transformers 5 has it no more.
            trainer.use_apex = False
        else:
            trainer = tiny.grpo(
                Recorder,
                policy,
                config_class,
                prompts=["w1 w2 w3"] * 8,
                num_iterations=1,
                beta=0.0,
                per_device_eval_batch_size=4,
                **settings,
            )
        padded_generate = policy.generate

        def generate_and_train(*args: Any, **kwargs: Any) -> Any:
            # From 0.24 on TRL itself does so after generate_batch, in an evaluation too, which changes the loss of it.
            completions = padded_generate(*args, **kwargs)
            policy.train()
            return completions

        def generate_batch(inputs: Any, **kwargs: Any) -> dict[int, Any]:
            run.generation_bits.update(8 * parameter.element_size() for parameter in policy.parameters())
            prompts = torch.tensor(inputs)
            completions = generate_and_train(prompts)[:, prompts.shape[1] :].tolist()
            # Nothing comes behind the end of a sequence: nothing is padded.
            return {
                row: SimpleNamespace(generated_tokens=tokens[: tokens.index(EOS) + 1])
                for row, tokens in enumerate(completions)
            }

        policy.generate, policy.generate_batch = generate_and_train, generate_batch
        if batching:
            # Not in the config: some releases would then require a newer transformers for its own generate_batch.
            trainer.continuous_batching_config = None
            for name in OPTIONS:
                setattr(trainer, name, True)
        trainer.add_callback(Gradients())
        trainer.train()
        if method != "OnlineDPO":  # It evaluates nothing that it generates.
            run.losses.append(trainer.evaluate(trainer.train_dataset.select(range(4)))["eval_loss"])
    if len(run.losses) < STEPS * MICRO_BATCHES:
        raise AssertionError(f"expected {STEPS} steps of {MICRO_BATCHES} micro-batches: {run.losses}")
    run.weights = {
        name: parameter.detach() for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    } | dict(trainer.model.named_buffers())
    return run
