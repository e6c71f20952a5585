"""Train with the real GRPO and RLOO trainers, in steps of two micro-batches, and resume within a generation.

The expected result is the run without a stop: the rows of each micro-batch, its loss, and the gradients of each step.
The learning rate is 0, so that completions which are generated anew have the log-probs of those that are gone. The
completions are fixed, and so is the order in which TRL shuffles them.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

from packaging.version import Version

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict
from trl_hotfix.patching import engine

import tiny

ID = "grpo-resume-within-generation"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "_skipped: `not step or args.ignore_data_skip` -> `args.ignore_data_skip`": "at step 0 the rest computes 0 too"
}
VARIANTS = "The order of the prompts does not depend on the model, nor on how it is trained."

MICRO_BATCHES = 2


class Case(NamedTuple):
    """A run of so many steps, and the stops from which it is resumed. ``generation`` is in micro-batches."""

    steps: int
    stops: tuple[int, ...]
    generation: int
    settings: dict[str, Any]


CASES = {
    "iterations": Case(4, (1,), 4, {"num_iterations": 2}),
    "second epoch": Case(11, (9,), 4, {"num_iterations": 2, "shuffle_dataset": False}),
    "parts": Case(4, (1,), 4, {"steps_per_generation": 4}),
    "parts and iterations": Case(8, (5,), 8, {"num_iterations": 2, "steps_per_generation": 4}),
}
"""Eight prompts, one for each part of a generation."""


def methods() -> list[str]:
    """Return the trainers that keep a generation for several micro-batches."""
    import trl

    found = ["GRPO"] if Version(version("trl")) >= Version("0.17.0") else []
    # RLOO of 0.26 counts twice.
    if "_prepare_inputs" in vars(trl.RLOOTrainer) and not version("trl").startswith("0.26."):
        found.append("RLOO")
    return found


def train() -> tiny.TrainingResult:
    import trl

    if not methods():
        return tiny.TrainingResult(absent("a generation is for one step, or is made by the step of the run"))
    kinds, runs = [], {}
    for method in methods():
        # RLOO has the same code.
        for name, case in CASES.items() if method == "GRPO" else [("iterations", CASES["iterations"])]:
            fields = getattr(trl, f"{method}Config").__dataclass_fields__
            if not case.settings.keys() <= fields.keys():
                continue
            whole, resumed = runs_of(method, case)
            kinds += [is_right(name, case, whole, run, stop) for stop, run in resumed.items()]
            runs |= {f"{method} {name} {stop}": run for stop, run in resumed.items()}
    outcome = judge(sum(kinds), right=len(kinds), wrong=0)
    if outcome.verdict is Verdict.FIXED and tiny.acts(ID, target(runs["GRPO iterations 1"]), runs["GRPO iterations 1"]):
        check_with_the_order_of_later_epochs()
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Resume where each generation is of one step, at a generation's end, and with the data from their beginning."""
    runs = {}
    for method in methods():
        for name, stop, settings in (
            ("one step", 1, {}),
            ("end", 2, {"num_iterations": 2}),
            ("data from the beginning", 1, {"num_iterations": 2, "ignore_data_skip": True}),
        ):
            whole, resumed = runs_of(method, Case(3, (stop,), 0, settings))
            runs |= {f"{method} {name} whole": whole, f"{method} {name}": resumed[stop]}
    for name, run in runs.items():
        assert not tiny.acts(ID, target(run), run), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("no run is resumed within a generation"))


def target(trainer: Any) -> str:
    base = next(base for base in type(trainer).__mro__ if "_prepare_inputs" in vars(base))
    method = "training_step" if "training_step" in vars(base) else "_prepare_inputs"
    return f"{base.__module__}:{base.__name__}.{method}"


def rows_of(run: Any) -> list[list[tuple[int, ...]]]:
    """Return the prompts and completions of each micro-batch, in order of their tokens."""
    import torch

    parts = [micro_batch.inputs for step in run.steps for micro_batch in step.micro_batches]
    rows = [torch.cat([part["prompt_ids"], part["completion_ids"]], 1).tolist() for part in parts]
    return [sorted(map(tuple, part)) for part in rows]


def is_right(name: str, case: Case, whole: Any, resumed: Any, stop: int) -> bool:
    """Return whether a run goes on like the one that was not stopped, and not as if a generation began at the stop."""
    import torch

    begin, rows, found = stop * MICRO_BATCHES, rows_of(whole), rows_of(resumed)
    assert len(rows) == case.steps * MICRO_BATCHES, rows
    right = rows[begin:]
    # Each generation is made where it is taken to begin, and gives its parts from the first on.
    wrong = []
    for place in range(len(right)):
        made = begin + place - place % case.generation
        wrong.append(rows[made - made % case.generation + place % case.generation])
    assert right != wrong, name
    if found == wrong:
        return False
    assert found == right, f"{name}, {stop}: the rows are {found}, right is {right}, and wrong {wrong}"
    for step, expected in zip(resumed.steps, whole.steps[stop:], strict=True):
        losses = [[micro_batch.loss for micro_batch in one.micro_batches] for one in (step, expected)]
        assert losses[0] == losses[1], f"{name}, {stop}: the losses are {losses}"
        different = [key for key, value in expected.gradients.items() if not torch.equal(step.gradients[key], value)]
        assert not different, f"{name}, {stop}: the gradients are others: {different}"
        assert any(bool(value.any()) for value in expected.gradients.values())
    return True


def check_with_the_order_of_later_epochs() -> None:
    """Check that a run goes on in its second epoch, which has another order, with the patch for that order, too."""
    case = Case(11, (9,), 4, {"num_iterations": 2})
    with engine.ENGINE.patched(("grpo-resume-replays-epoch-0-order", ID), strict=False, unknown_body="try"):
        whole, resumed = runs_of("GRPO", case)
        assert is_right("shuffled", case, whole, resumed[9], 9), rows_of(resumed[9])


def runs_of(method: str, case: Case) -> tuple[Any, dict[int, Any]]:
    """Train a whole run, and from the checkpoint at each stop a run to the same end."""
    with tempfile.TemporaryDirectory() as folder:

        def train_from(checkpoint: Path | None) -> Any:
            trainer = trainer_of(method, folder, case)
            trainer.train(resume_from_checkpoint=checkpoint and str(checkpoint))
            return trainer

        whole, resumed = train_from(None), {}
        for stop in case.stops:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            (checkpoint / "rng_state.pth").unlink()
            resumed[stop] = train_from(checkpoint)
    return whole, resumed


def trainer_of(method: str, folder: str, case: Case) -> Any:
    """Return a trainer that saves a checkpoint at each stop."""
    import trl
    from transformers import TrainerCallback

    class SaveAtStops(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = state.global_step in case.stops

    settings = {
        "num_iterations": 1,
        "gradient_accumulation_steps": MICRO_BATCHES,
        "learning_rate": 0.0,
        **case.settings,
    }
    trainer = tiny.grpo(
        tiny.stepwise(getattr(trl, f"{method}Trainer")),
        tiny.llama(folder, seed=0),
        getattr(trl, f"{method}Config"),
        output_dir=folder,
        max_steps=case.steps,
        **settings,
    )
    trainer.add_callback(SaveAtStops())
    return trainer
