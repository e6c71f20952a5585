"""Train epochs of five micro-batches, two a step, with the real SFT and DPO trainers, and resume within an epoch.

A run without a stop has three steps an epoch. A resumed run never takes the third of the epoch that it begins in, and
one line says so. A run that is resumed at the end of an epoch, or whose epoch has full steps only, gets no line.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "last-window-lost-on-resume"
OVERLAYS = ()
PARITY = False
VARIANTS = "It changes nothing that is computed."

METHODS = ("SFT", "DPO")


def train() -> tiny.TrainingResult:
    import transformers

    if not in_range(transformers.__version__, ">=4.52,<4.57"):
        return tiny.TrainingResult(absent("this transformers counts the skipped micro-batches, or loses every tail"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    said, runs = 0, {}
    for method in METHODS:
        for epochs in (1, 2):
            whole, run, lines = resumed(method, rows=5, epochs=epochs, stop=1)
            assert len(lines) == patched, (method, epochs, lines)
            assert whole.state.global_step == whole.state.max_steps == 3 * epochs, whole.state.global_step
            # One epoch: the second step is the last. Two: the fifth micro-batch's gradient is in the next epoch's step.
            assert run.state.global_step == 3 * epochs - 1, run.state.global_step
            sizes = [len(step.micro_batches) for step in run.steps]
            assert sizes == ([2, 1] if epochs == 1 else [2, 3, 2, 1]), sizes
            runs[f"{method} {epochs}"] = run
            said += len(lines)
    return tiny.result_of_runs(runs, judge(said, right=2 * len(METHODS), wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Resume at the end of an epoch, within an epoch of full steps, and in a run that ends before the epoch does."""
    runs: dict[str, Any] = {}
    for method in METHODS:
        for rows, stop, options in ((5, 3, {}), (4, 1, {}), (5, 1, {"max_steps": 2})):
            whole, run, lines = resumed(method, rows=rows, epochs=2, stop=stop, **options)
            assert not lines, (method, rows, stop, lines)
            assert _is_right_here() <= (run.state.global_step == whole.state.global_step)
            runs[f"{method} {rows} {stop} {options}"] = run
    return tiny.result_of_runs(runs, absent("the resumed epoch has no short step, or does not reach it"))


def _is_right_here() -> bool:
    import transformers

    return in_range(transformers.__version__, ">=4.52")


def resumed(method: str, *, rows: int, epochs: int, stop: int, **settings: Any) -> tuple[Any, Any, list[str]]:
    """Return a run without a stop, one resumed from a checkpoint of it, and what trl_hotfix says of the last step."""
    with tempfile.TemporaryDirectory() as folder:
        whole = _trainer(method, folder, rows, epochs, save_strategy="steps", save_steps=1, **settings)
        whole.train()
        checkpoint = Path(folder, f"checkpoint-{stop}")
        # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
        (checkpoint / "rng_state.pth").unlink()

        def go_on() -> Any:
            run = _trainer(method, folder, rows, epochs, save_strategy="no", **settings)
            run.train(resume_from_checkpoint=str(checkpoint))
            return run

        run, lines = tiny.warnings_of(go_on)
    return whole, run, [line for line in lines if "last step of this resumed epoch" in line]


def _trainer(method: str, folder: str, rows: int, epochs: int, **settings: Any) -> Any:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    if method == "SFT":
        data = Dataset.from_list([{"text": words(number, 3 + number)} for number in range(rows)])
    else:
        data = preferences_of_several_lengths().select(range(rows))
    return tiny.trainer(
        tiny.stepwise(trainer_class),
        model=tiny.llama(folder, seed=0),
        args=tiny.config(
            config_class,
            **{
                "output_dir": folder,
                "max_steps": -1,
                "num_train_epochs": epochs,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "max_length": 32,
                "optim": "sgd",
                "learning_rate": 0.1,
                **settings,
            },
        ),
        train_dataset=data,
        tokenizer=tiny.tokenizer(),
        **({"ref_model": tiny.llama(folder, seed=1)} if method == "DPO" else {}),
    )
