"""Train an adapter for three epochs with the real GRPO, RLOO, DPO and KTO trainers, and resume from checkpoints.

A step has two micro-batches. One run goes on in the middle of its first epoch, and one in the middle of its third. The
expected result is the run without a stop: the losses and gradients of its steps, and its weights in the end. The
checkpoints are those of a trainer that is as TRL makes it, without the patch.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.trainers import classes_with_a_reference_adapter, methods_with_a_reference_adapter

OVERLAYS = ()
PARITY = False
VARIANTS = {"full": "what begins again is an adapter"}

MICRO_BATCHES, STEPS, STOPS = 2, 6, (1, 5)

_UNAFFECTED = {"GRPO": ("none", "new", "other", "no reference"), "DPO": ("alone", "no reference")}
EQUIVALENT = {"applied twice": "the same weights are loaded again"}


@dataclass
class Run:
    """The steps of a run, the weights of its adapters in the end, and how often the patch acted."""

    steps: list[tiny.Step] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    acts: int | None = None

    @property
    def loss(self) -> float:
        return sum(micro_batch.loss for step in self.steps for micro_batch in step.micro_batches)

    def gradients(self, name: str) -> dict[str, Any]:
        """Return all gradients. ``name`` is that of the run."""
        return {
            f"{name} {number} {parameter}": gradient
            for number, step in enumerate(self.steps)
            for parameter, gradient in step.gradients.items()
        }


def train() -> tiny.TrainingResult:
    loss, gradients, kinds = 0.0, {}, []
    for method in methods_with_a_reference_adapter():
        whole, resumed = _runs(method, "trained", STEPS, STOPS)
        for stop, run in resumed.items():
            kinds.append(_is_right(method, whole, run, stop))
            if (whole.acts, run.acts) not in ((None, None), (0, 1)):
                raise AssertionError(f"{method}: the patch acts {whole.acts} and {run.acts} times")
            loss += run.loss
            gradients |= run.gradients(f"{method} {stop}")
    if not kinds:
        return tiny.TrainingResult(absent("no trainer makes an adapter of its own"))
    return tiny.TrainingResult(judge(sum(kinds), right=len(kinds), wrong=0), loss, gradients)


def unaffected() -> tiny.TrainingResult:
    """Resume runs whose adapter is loaded as it is, or that have none, and train one that is not resumed.

    The adapter is a new one of the trainer's, it has no reference beside it, it has another name, or the checkpoint has
    no adapter but this one.
    """
    loss, gradients = 0.0, {}
    for method in methods_with_a_reference_adapter():
        for kind in {"GRPO": ("none", "new", "other", "no reference"), "DPO": ("alone", "no reference")}.get(
            method, ()
        ):
            whole, resumed = _runs(method, kind, 2, (1,))
            # With the patch on, the constructor of every trainer is counted, and never acts.
            if {run.acts for run in (whole, *resumed.values())} not in ({None}, {0}):
                raise AssertionError(f"{method}, {kind}: the patch acts, although nothing is missing")
            if not all(_is_right(method, whole, run, stop) for stop, run in resumed.items()):
                raise AssertionError(f"{method}, {kind}: the resumed run begins again")
            for name, run in {"whole": whole, **resumed}.items():
                loss += run.loss
                gradients |= run.gradients(f"{method} {kind} {name}")
    return tiny.TrainingResult(absent("the checkpoint is loaded as it is"), loss, gradients)


def _is_right(method: str, whole: Run, resumed: Run, stop: int) -> bool:
    """Return whether a run goes on like the one that was not stopped, and not with the adapter of the beginning."""
    begin, expected = resumed.steps[0].weights, whole.steps[stop].weights
    if _equal(begin, whole.steps[0].weights):
        return False
    if not _equal(begin, expected):
        raise AssertionError(f"{method}: the weights after step {stop} are neither the first ones nor the right ones")
    pairs = [(resumed.weights, whole.weights)]
    for step, of_whole in zip(resumed.steps, whole.steps[stop:], strict=True):
        pairs.append((step.gradients, of_whole.gradients))
        losses, right = ([micro_batch.loss for micro_batch in run.micro_batches] for run in (step, of_whole))
        if losses != right or len(losses) != MICRO_BATCHES:
            raise AssertionError(f"{method}: after step {stop} the losses are {losses}, without a stop {right}")
    if not all(_equal(*pair) for pair in pairs):
        raise AssertionError(f"{method}: gradients or weights after step {stop} are not as without a stop")
    return True


def _equal(values: dict[str, Any], expected: dict[str, Any]) -> bool:
    return values.keys() == expected.keys() and all(values[name].equal(expected[name]) for name in expected)


def _runs(method: str, kind: str, steps: int, stops: tuple[int, ...]) -> tuple[Run, dict[int, Run]]:
    """Train a whole run, and from the checkpoint at each stop a run to the same end."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = _trainer(method, kind, folder, steps, stops)
        # So it is the trainer that TRL makes. The patch gives it this method.
        vars(trainer).pop("_load_from_checkpoint", None)
        trainer.train()
        whole, resumed = _run(method, trainer), {}
        for stop in stops:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            (checkpoint / "rng_state.pth").unlink()
            if kind == "alone":
                shutil.rmtree(checkpoint / "ref")
            trainer = _trainer(method, kind, folder, steps, ())
            trainer.train(resume_from_checkpoint=str(checkpoint))
            resumed[stop] = _run(method, trainer)
    return whole, resumed


def _run(method: str, trainer: Any) -> Run:
    module = classes_with_a_reference_adapter(method)[0].__module__
    acts = tiny.acts("peft-resume-restarts-adapter", f"{module}:{method}Trainer.__init__", trainer)
    weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
    return Run(trainer.steps, weights, acts)


def _trainer(method: str, kind: str, folder: str, steps: int, stops: tuple[int, ...]) -> Any:
    """Return a trainer of this kind of model that saves a checkpoint at each stop."""
    import torch
    from transformers import TrainerCallback

    class SaveAtStops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step in stops

    trainer_class, config_class = classes_with_a_reference_adapter(method)
    settings: dict[str, Any] = {"max_steps": steps, "gradient_accumulation_steps": MICRO_BATCHES, "output_dir": folder}
    settings |= {"beta": 0.0 if (method, kind) == ("GRPO", "no reference") else 0.5, "learning_rate": 0.05}
    # A new adapter is drawn at random.
    torch.manual_seed(0)
    model, new = _model(kind, folder), {"peft_config": tiny.lora()} if kind == "new" else {}
    if method in ("GRPO", "RLOO"):
        settings |= {"prompts": tiny.PROMPTS[:4], "num_iterations": 1, "shuffle_dataset": False}
        trainer = tiny.grpo(tiny.stepwise(trainer_class), model, config_class, **settings, **new)
    else:
        if kind == "no reference":
            new["ref_model"] = tiny.llama(folder, seed=1)
        pairs = preferences_of_several_lengths()
        trainer = tiny.trainer(
            _in_order(tiny.stepwise(trainer_class)),
            model=model,
            args=tiny.config(config_class, max_length=16, **settings),
            train_dataset=pairs if method == "DPO" else tiny.labelled(pairs.select(range(4))),
            tokenizer=tiny.tokenizer(),
            **new,
        )
    trainer.add_callback(SaveAtStops())
    return trainer


def _in_order(trainer_class: Any) -> Any:
    """Return a subclass of the trainer that does not shuffle: accelerate forgets the epoch where it skips batches."""
    from torch.utils.data import SequentialSampler

    class InOrder(trainer_class):  # type: ignore[misc]
        def _get_train_sampler(self, *args: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    return InOrder


def _model(kind: str, folder: str) -> Any:
    from peft import get_peft_model

    model = tiny.llama(folder, seed=0)
    if kind in ("none", "new"):
        return model
    model = get_peft_model(model, tiny.lora())
    if kind == "other":
        model.add_adapter("other", tiny.lora())
        model.set_adapter("other")
    tiny.set_adapters(model)
    return model
