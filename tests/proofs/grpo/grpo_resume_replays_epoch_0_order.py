"""Train three epochs with the real GRPO and RLOO trainers, in steps of two micro-batches, and resume from checkpoints.

One run goes on in the middle of its second epoch, and one in the middle of its third. The expected result is the run
without a stop: the order of its prompts, the losses and gradients of its steps, and its weights in the end.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False
VARIANTS = "The order of the prompts does not depend on the model, nor on how it is trained."

MICRO_BATCHES, STEPS_PER_EPOCH = 2, 4
STEPS, STOPS = 3 * STEPS_PER_EPOCH, (6, 10)


@dataclass
class Run:
    """The prompts of each micro-batch, the steps, and the weights in the end."""

    prompts: list[Any] = field(default_factory=list)
    steps: list[tiny.Step] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)

    @property
    def result(self) -> tuple[float, dict[str, Any]]:
        """The losses of all steps together, and the gradients of the last one."""
        losses = [micro_batch.loss for step in self.steps for micro_batch in step.micro_batches]
        return sum(losses), self.steps[-1].gradients


def train() -> tiny.TrainingResult:
    import trl

    methods = [
        name for name in ("GRPO", "RLOO") if "_get_train_sampler" in vars(getattr(trl, f"{name}Trainer", object))
    ]
    if not methods:
        return tiny.TrainingResult(absent("this release leaves the sampler to transformers"))
    loss, gradients, kinds = 0.0, {}, []
    for method in methods:
        whole, resumed = _runs(method, STEPS, STOPS)
        for stop, run in resumed.items():
            kinds.append(_is_right(method, whole, run, stop))
            loss += run.result[0]
            gradients |= {f"{method}.{stop}.{name}": gradient for name, gradient in run.result[1].items()}
    return tiny.TrainingResult(judge(sum(kinds), right=len(kinds), wrong=0), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Train two epochs, resume a run in its first epoch, and one in its second on data that are not shuffled."""
    from trl import GRPOConfig

    whole, resumed = _runs("GRPO", STEPS_PER_EPOCH + 1, (2,))
    runs = {"whole": whole, "first epoch": resumed[2]}
    if "shuffle_dataset" in GRPOConfig.__dataclass_fields__:
        _, resumed = _runs("GRPO", STEPS_PER_EPOCH + 2, (STEPS_PER_EPOCH + 1,), shuffle_dataset=False)
        runs["in order"] = resumed[STEPS_PER_EPOCH + 1]
    results = {name: run.result for name, run in runs.items()}
    gradients = {f"{run}.{name}": value for run, (_, of_run) in results.items() for name, value in of_run.items()}
    loss = sum(loss for loss, _ in results.values())
    return tiny.TrainingResult(absent("no shuffled run is resumed after its first epoch"), loss, gradients)


def _is_right(method: str, whole: Run, resumed: Run, stop: int) -> bool:
    """Return whether a run goes on like the one that was not stopped, and not in the order of its first epoch."""
    import torch

    finished = stop // STEPS_PER_EPOCH * STEPS_PER_EPOCH * MICRO_BATCHES
    begin, end = stop * MICRO_BATCHES, STEPS * MICRO_BATCHES
    right, wrong = whole.prompts[begin:end], whole.prompts[begin - finished : end - finished]
    if right == wrong or len(whole.steps) != STEPS or len(whole.prompts) != end:
        raise AssertionError(f"{method}: these are no three orders of the prompts: {whole.prompts}")
    if resumed.prompts == wrong:
        return False
    if resumed.prompts != right:
        raise AssertionError(f"{method}: the prompts are {resumed.prompts}, right is {right}, and wrong {wrong}")
    pairs = [(resumed.weights, whole.weights)]
    for step, expected in zip(resumed.steps, whole.steps[stop:], strict=True):
        pairs.append((step.gradients, expected.gradients))
        if [micro_batch.loss for micro_batch in step.micro_batches] != [
            micro_batch.loss for micro_batch in expected.micro_batches
        ]:
            raise AssertionError(f"{method}: the losses after step {stop} are not those of the whole run")
    for values, expected_values in pairs:
        different = [name for name, value in expected_values.items() if not torch.equal(values[name], value)]
        if different:
            raise AssertionError(f"{method}: not as without a stop after step {stop}: {different}")
    return True


def _runs(method: str, steps: int, stops: tuple[int, ...], **settings: Any) -> tuple[Run, dict[int, Run]]:
    """Train a whole run, and from the checkpoint at each stop a run to the same end."""
    with tempfile.TemporaryDirectory() as folder:

        def train_from(checkpoint: Path | None) -> Run:
            trainer = _trainer(method, folder, steps, stops, **settings)
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            return Run(trainer.prompts, trainer.steps, trainer.model.state_dict())

        whole, resumed = train_from(None), {}
        for stop in stops:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            (checkpoint / "rng_state.pth").unlink()
            resumed[stop] = train_from(checkpoint)
    return whole, resumed


def _trainer(method: str, folder: str, steps: int, stops: tuple[int, ...], **settings: Any) -> Any:
    """Return a trainer that records its prompts, and saves a checkpoint at each stop."""
    import trl
    from transformers import TrainerCallback

    class SaveAtStops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step in stops

    class PromptRecorder(getattr(trl, f"{method}Trainer")):  # type: ignore[misc]
        def _prepare_inputs(self, inputs: Any) -> Any:
            self.prompts.append([row["prompt"] for row in inputs])
            return super()._prepare_inputs(inputs)

    trainer = tiny.grpo(
        tiny.stepwise(PromptRecorder),
        tiny.llama(folder, seed=0),
        getattr(trl, f"{method}Config"),
        num_iterations=1,
        output_dir=folder,
        max_steps=steps,
        gradient_accumulation_steps=MICRO_BATCHES,
        beta=0.04,
        **settings,
    )
    trainer.prompts = []
    trainer.add_callback(SaveAtStops())
    return trainer
