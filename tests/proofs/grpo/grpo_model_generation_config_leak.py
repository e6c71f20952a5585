"""Train two steps of two micro-batches with the real GRPO and RLOO trainers, and evaluate.

The checkpoint ships a temperature of 0.0001, at which all completions of a prompt are the same, and more. The trainers
ask for the defaults of the library. The expected completions are those of transformers for a checkpoint that ships
nothing, with the weights of that moment and the same random numbers. Losses, accumulated gradients and evaluation are
those of a run of such a checkpoint.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny

OVERLAYS = ()
# Up to 0.17 the trainer samples from the 50 likeliest tokens: other completions.
PARITY = ">=0.18.0"


STEPS, MICRO_BATCHES = 2, 2
SHIPPED = {"temperature": 1e-4, "top_p": 0.5, "repetition_penalty": 1.5}


@dataclass
class Run:
    """The steps and the evaluation of a run, and for each generation the completions, as they are and as expected."""

    steps: list[tiny.Step] = field(default_factory=list)
    evaluations: list[tiny.MicroBatch] = field(default_factory=list)
    completions: list[Any] = field(default_factory=list)
    expected: list[Any] = field(default_factory=list)
    evaluated: list[Any] = field(default_factory=list)

    @property
    def losses(self) -> list[float]:
        of_steps = [micro_batch.loss for step in self.steps for micro_batch in step.micro_batches]
        return of_steps + [micro_batch.loss for micro_batch in self.evaluations]

    @property
    def gradients(self) -> dict[str, Any]:
        return {
            f"{number}.{name}": value
            for number, step in enumerate(self.steps)
            for name, value in step.gradients.items()
        }


def train() -> tiny.TrainingResult:
    import trl

    if not hasattr(trl, "GRPOTrainer"):
        return tiny.TrainingResult(absent("this release has no GRPO"))
    # Until 0.22.0 RLOO has a training loop of its own.
    methods = ["GRPO", *(["RLOO"] if hasattr(trl.RLOOTrainer, "_generate_and_score_completions") else [])]
    runs = {method: _run(method, SHIPPED) for method in methods}
    generations = [pair for run in runs.values() for pair in zip(run.completions, run.expected, strict=True)]
    as_expected = sum(completions == expected for completions, expected in generations)
    outcome = judge(as_expected, right=len(generations), wrong=0)
    if outcome.verdict is Verdict.FIXED:
        for method, run in runs.items():
            _compare(method, run, _run(method, {}))
    return tiny.TrainingResult(outcome, runs["GRPO"].losses[0], runs["GRPO"].gradients)


def unaffected() -> tiny.TrainingResult:
    """Train a checkpoint that ships nothing, and one whose trainer asks for another temperature than the default."""
    runs = {"nothing": _run("GRPO", {}), "0.9": _run("GRPO", {"temperature": 0.5}, asked_for=0.9)}
    for name, run in runs.items():
        if run.completions != run.expected:
            raise AssertionError(f"{name}: the completions are {run.completions}, and not {run.expected}")
    gradients = {f"{name}.{key}": value for name, run in runs.items() for key, value in run.gradients.items()}
    return tiny.TrainingResult(absent("nothing is merged"), sum(sum(run.losses) for run in runs.values()), gradients)


def _compare(method: str, run: Run, expected: Run) -> None:
    """Check that a run is that of a checkpoint that ships nothing, to the bit."""
    import torch
    import trl

    if len(run.steps) != STEPS or any(len(step.micro_batches) != MICRO_BATCHES for step in run.steps):
        raise AssertionError(f"{method}: expected {STEPS} steps of {MICRO_BATCHES} micro-batches: {run.steps}")
    # 0.14.0 cannot evaluate.
    if "prediction_step" in vars(trl.GRPOTrainer) and (not run.evaluations or True not in run.evaluated):
        raise AssertionError(f"{method}: nothing was generated in an evaluation: {run.evaluated}")
    different = [name for name, value in expected.gradients.items() if not torch.equal(run.gradients[name], value)]
    if different or run.losses != expected.losses or run.gradients.keys() != expected.gradients.keys():
        raise AssertionError(f"{method}: not as without a temperature: {different}, {run.losses}, {expected.losses}")


def _run(method: str, shipped: dict[str, float], *, asked_for: float = 1.0) -> Run:
    """Train and evaluate. ``shipped`` is in the checkpoint's generation config, ``asked_for`` the trainer's own."""
    import torch
    import trl

    run = Run()
    with tempfile.TemporaryDirectory() as folder:
        policy, plain = (tiny.llama(folder, seed=0) for _ in range(2))
        # Scaled, the head gives probabilities that are neither all alike nor all on one token.
        policy.get_output_embeddings().weight.data *= 10
        # 0.14.0 has four completions of each prompt of the batch, later releases four in a batch.
        batch_size = 1 if trl.__version__ == "0.14.0" else 4
        trainer = tiny.grpo_of_one_length(
            tiny.stepwise(getattr(trl, f"{method}Trainer")),
            policy,
            config_class=getattr(trl, f"{method}Config"),
            per_device_train_batch_size=batch_size,
            per_device_eval_batch_size=batch_size,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_steps=STEPS,
            optim="sgd",
            learning_rate=0.1,
            loss_type="grpo",
            num_iterations=1,
            beta=0.0,
            temperature=asked_for,
        )
        if "prediction_step" in vars(trl.GRPOTrainer):
            # An evaluation within the training is known as one in every release. The constructor wants both at once.
            trainer.eval_dataset = trainer.train_dataset.select(range(4))
            trainer.args.eval_strategy, trainer.args.eval_steps = "steps", STEPS
        # The policy samples by itself, from the same random numbers each time.
        del policy.generate
        generate = policy.generate

        def seeded_generate(input_ids: Any = None, **settings: Any) -> Any:
            seed = len(run.completions)
            plain.load_state_dict(policy.state_dict())
            torch.manual_seed(seed)
            expected = plain.generate(
                input_ids=input_ids,
                attention_mask=settings["attention_mask"],
                generation_config=trainer.generation_config,
            )
            torch.manual_seed(seed)
            sequences = generate(input_ids=input_ids, **settings)
            run.completions.append(sequences.tolist())
            run.expected.append(expected.tolist())
            run.evaluated.append(not policy.training)
            return sequences

        policy.generate = seeded_generate
        policy.generation_config.update(**shipped)
        trainer.train()
        after = policy.generation_config.to_dict()
        if any(after[name] != value for name, value in shipped.items()):
            raise AssertionError(f"the checkpoint's own config is {after} afterwards")
    run.steps, run.evaluations = trainer.steps, trainer.evaluations
    return run
