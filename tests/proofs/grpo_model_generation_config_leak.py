"""Train one step with the real GRPO and RLOO trainers on a checkpoint that ships a temperature of 0.0001.

The trainers ask for 1.0, at which four completions of a prompt differ; at 0.0001 all four are the same. The expected
completions are those of a checkpoint without a temperature of its own, from the same random numbers.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
# Up to 0.17 the trainer samples from the 50 likeliest tokens: other completions.
PARITY = ">=0.18.0"

SEED = 9
"""With these random numbers no completion ends: all have eight tokens, so every release has the same loss."""


@dataclass
class Step:
    """One step: its loss, its gradients, its completions, and those of a checkpoint without a temperature."""

    loss: float
    gradients: dict[str, Any]
    completions: list[list[int]]
    expected_completions: list[list[int]]


def one_step(method: str, *, temperature: float | None, asked_for: float = 1.0) -> Step:
    """Train one step. ``temperature`` is the checkpoint's, ``asked_for`` the trainer's."""
    import torch
    import trl

    completions: list[list[int]] = []
    expected_completions: list[list[int]] = []
    with tempfile.TemporaryDirectory() as folder:
        policy, plain = (tiny.llama(folder, seed=0) for _ in range(2))
        # Scaled, the head gives probabilities that are neither all alike nor all on one token.
        for model in (policy, plain):
            model.get_output_embeddings().weight.data *= 10
        trainer = tiny.grpo_of_one_length(
            tiny.measured(getattr(trl, f"{method}Trainer")),
            policy,
            config_class=getattr(trl, f"{method}Config"),
            # 0.14.0 has four completions of each prompt of the batch, later releases four in a batch.
            per_device_train_batch_size=1 if trl.__version__ == "0.14.0" else 4,
            num_iterations=1,
            beta=0.0,
            temperature=asked_for,
        )
        # The policy samples by itself, from the same random numbers each time.
        del policy.generate
        generate = policy.generate

        def seeded_generate(input_ids: Any = None, **settings: Any) -> Any:
            torch.manual_seed(SEED)
            sequences = generate(input_ids=input_ids, **settings)
            completions[:] = sequences[:, input_ids.shape[1] :].tolist()
            torch.manual_seed(SEED)
            plain_sequences = plain.generate(
                input_ids=input_ids,
                attention_mask=settings["attention_mask"],
                temperature=asked_for,
                do_sample=True,
                max_new_tokens=8,
                pad_token_id=0,
                eos_token_id=1,
                # Up to 0.17 the trainer asks for 50.
                top_k=getattr(trainer.generation_config, "top_k", None),
                # 0.14.0 has the model answer a prompt several times.
                num_return_sequences=getattr(trainer.generation_config, "num_return_sequences", None) or 1,
            )
            expected_completions[:] = plain_sequences[:, input_ids.shape[1] :].tolist()
            return sequences

        policy.generate = seeded_generate
        if temperature is not None:
            policy.generation_config.temperature = temperature
        trainer.train()
        if getattr(policy.generation_config, "temperature", None) != (temperature or 1.0):
            raise AssertionError(f"the checkpoint's temperature is {policy.generation_config.temperature} afterwards")
    if any(len(tokens) != 8 or 1 in tokens for tokens in expected_completions) or not expected_completions:
        raise AssertionError(f"a completion comes to an end: {expected_completions}")
    return Step(trainer.losses[0], trainer.step.gradients, completions, expected_completions)


def train() -> tiny.TrainingResult:
    import transformers
    import trl
    from packaging.version import Version

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    # Until 0.22.0 RLOO has a training loop of its own.
    methods = ["GRPO", *(["RLOO"] if hasattr(trl.RLOOTrainer, "_generate_and_score_completions") else [])]
    steps = {method: one_step(method, temperature=1e-4) for method in methods}
    distinct = sum(len({tuple(tokens) for tokens in step.completions}) for step in steps.values())
    outcome = judge(distinct, right=4 * len(steps), wrong=len(steps))
    different = [method for method, step in steps.items() if step.completions != step.expected_completions]
    # transformers 5 merges nothing, and has other defaults for the plain call.
    comparable = Version(transformers.__version__) < Version("5.0.0.dev0")
    if outcome.verdict.value == "fixed" and different and comparable:
        raise AssertionError(
            f"{different}: the completions are not those of a checkpoint without a temperature: {steps}"
        )
    return tiny.TrainingResult(outcome, steps["GRPO"].loss, steps["GRPO"].gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a checkpoint without a temperature, and one whose trainer asks for another temperature than the default."""
    steps = {
        "says nothing": one_step("GRPO", temperature=None),
        "0.9": one_step("GRPO", temperature=0.5, asked_for=0.9),
    }
    gradients = {f"{name}.{key}": gradient for name, step in steps.items() for key, gradient in step.gradients.items()}
    return tiny.TrainingResult(absent("nothing is merged"), sum(step.loss for step in steps.values()), gradients)
