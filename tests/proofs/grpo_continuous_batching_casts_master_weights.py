"""Train two steps with the real GRPO and RLOO trainers, bf16=True and continuous batching.

Continuous batching needs a GPU, so a substitute for ``generate_batch`` returns the completions of the padded
``generate``. The expected result is a run with the padded ``generate``: it has the same losses, the same gradients and
the same weights after two steps.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False

OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")


@dataclass
class TwoSteps:
    """Losses, first gradients, the trained weights after two steps, and the bits of the weights that generated."""

    losses: list[float]
    gradients: dict[str, Any]
    weights: dict[str, Any]
    generation_bits: set[int]


def two_steps(method: str, *, batching: bool, bf16: bool = True, dtype: Any = None) -> TwoSteps:
    import torch
    import trl

    generation_bits: set[int] = set()
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        if dtype is not None:
            policy.to(dtype)
        torch.manual_seed(0)
        trainer = tiny.grpo_of_one_length(
            tiny.measured(getattr(trl, f"{method}Trainer")),
            policy,
            config_class=getattr(trl, f"{method}Config"),
            num_iterations=1,
            beta=0.0,
            max_steps=2,
            learning_rate=1e-6,
            bf16=bf16,
        )
        padded_generate = policy.generate

        def generate_batch(inputs: Any, **kwargs: Any) -> dict[int, Any]:
            generation_bits.update(8 * parameter.element_size() for parameter in policy.parameters())
            prompts = torch.tensor(inputs)
            completions = padded_generate(prompts)[:, prompts.shape[1] :].tolist()
            return {row: SimpleNamespace(generated_tokens=tokens) for row, tokens in enumerate(completions)}

        policy.generate_batch = generate_batch
        if batching:
            # Not in the config: some releases would then require a newer transformers for its own generate_batch.
            trainer.continuous_batching_config = None
            for name in OPTIONS:
                setattr(trainer, name, True)
        trainer.train()
    weights = {
        name: parameter.detach() for name, parameter in trainer.model.named_parameters() if parameter.requires_grad
    }
    return TwoSteps(trainer.losses, trainer.step.gradients, weights, generation_bits)


def train() -> tiny.TrainingResult:
    import torch
    import trl

    methods = [
        method
        for method in ("GRPO", "RLOO")
        if any(
            name in getattr(trl, f"{method}Config", object).__dict__.get("__dataclass_fields__", {}) for name in OPTIONS
        )
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release has no continuous batching"))
    kept = trained = 0
    gradients: dict[str, Any] = {}
    for method in methods:
        padded, batched = two_steps(method, batching=False), two_steps(method, batching=True)
        if batched.generation_bits != {16}:
            raise AssertionError(f"{method} generated with {batched.generation_bits} bits")
        trained += len(padded.weights)
        full_precision = [name for name, weight in batched.weights.items() if weight.dtype == torch.float32]
        kept += len(full_precision)
        different = [
            name
            for expected, measured in ((padded.weights, batched.weights), (padded.gradients, batched.gradients))
            for name in full_precision
            if not torch.equal(measured[name], expected[name])
        ]
        if different or (full_precision and batched.losses != padded.losses):
            raise AssertionError(f"{method}: not as with the padded generate: {different}, {batched.losses}")
        gradients |= {f"{method}.{name}": gradient for name, gradient in batched.gradients.items()}
    return tiny.TrainingResult(judge(kept, right=trained, wrong=0), batched.losses[0], gradients)


def unaffected() -> tiny.TrainingResult:
    """Train with the padded ``generate``, without mixed precision, and with weights in bfloat16 from the beginning."""
    import torch

    runs = {
        "padded": two_steps("GRPO", batching=False),
        "float32": two_steps("GRPO", batching=True, bf16=False),
        "bfloat16": two_steps("GRPO", batching=True, dtype=torch.bfloat16),
    }
    gradients = {f"{name}.{key}": gradient for name, run in runs.items() for key, gradient in run.gradients.items()}
    return tiny.TrainingResult(absent("nothing is cast"), sum(sum(run.losses) for run in runs.values()), gradients)
