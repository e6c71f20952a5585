"""Train three epochs with the real SFT and DPO trainers, in steps of two micro-batches, and resume from checkpoints.

One run goes on in the middle of its second epoch, and one in the middle of its third. The expected result is the run
without a stop: the order of its rows, the losses and gradients of its steps, and its weights in the end.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "resume-replays-epoch-0-order"
OVERLAYS = ()
PARITY = False
VARIANTS = "The order of the rows does not depend on the model, nor on how it is trained."

METHODS = ("SFT", "DPO")
MICRO_BATCHES, STEPS_OF_EPOCH = 2, 4
STEPS, STOPS = 3 * STEPS_OF_EPOCH, (6, 10)


def train() -> tiny.TrainingResult:
    runs: dict[str, Any] = {}
    right = []
    for method in METHODS:
        whole, resumed = _runs(method, STEPS, STOPS)
        for stop, run in resumed.items():
            right.append(_is_right(whole, run, stop))
            assert _acts(run, method) in (None, 1), f"{method} {stop}: it acts {_acts(run, method)} times"
            runs[f"{method} {stop}"] = run
        assert not _acts(whole, method), method
    outcome = judge(sum(right), right=len(right), wrong=0)
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Resume a run in its first epoch, and one at the end of its first epoch."""
    runs: dict[str, Any] = {}
    for method in METHODS:
        whole, resumed = _runs(method, STEPS_OF_EPOCH + 2, (2, STEPS_OF_EPOCH))
        for stop, run in resumed.items():
            assert _is_right(whole, run, stop), f"{method} {stop}: the resumed run has another order"
            assert not _acts(run, method), f"{method} {stop}: it acts"
            runs[f"{method} {stop}"] = run
    return tiny.result_of_runs(runs, absent("no run is resumed within a later epoch"))


def _is_right(whole: Any, resumed: Any, stop: int) -> bool:
    """Return whether a run goes on like the one that was not stopped, and not in the order of its first epoch."""
    expected, begin = _rows(whole), stop * MICRO_BATCHES
    found, rest = _rows(resumed), (STEPS_OF_EPOCH - stop % STEPS_OF_EPOCH) % STEPS_OF_EPOCH * MICRO_BATCHES
    if found != expected[begin:]:
        earlier = begin - stop // STEPS_OF_EPOCH * STEPS_OF_EPOCH * MICRO_BATCHES
        assert found[:rest] == expected[earlier : earlier + rest], "the order is that of no epoch"
        assert found[rest:] == expected[begin + rest :], "a later epoch has another order"
        return False
    for step, of_whole in zip(resumed.steps, whole.steps[stop:], strict=True):
        assert step.gradients.keys() == of_whole.gradients.keys()
        assert all(value.equal(of_whole.gradients[name]) for name, value in step.gradients.items())
    last = whole.model.state_dict()
    assert all(value.equal(last[name]) for name, value in resumed.model.state_dict().items())
    return True


def _rows(trainer: Any) -> list[Any]:
    """Return what each micro-batch has been of."""
    return [
        {name: value.tolist() for name, value in part.inputs.items() if name.endswith("input_ids")}
        for step in trainer.steps
        for part in step.micro_batches
    ]


def _runs(method: str, steps: int, stops: tuple[int, ...]) -> tuple[Any, dict[int, Any]]:
    """Train a run without a stop, and resume one from the checkpoint at each stop."""
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = _trainer(method, folder, steps, save_steps=2), {}
        whole.train()
        for stop in stops:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            # Old releases of transformers cannot read it with a torch as new as the bench's; nothing here is random.
            (checkpoint / "rng_state.pth").unlink()
            resumed[stop] = _trainer(method, folder, steps, save_strategy="no")
            resumed[stop].train(resume_from_checkpoint=str(checkpoint))
    return whole, resumed


def _trainer(method: str, folder: str, steps: int, **settings: Any) -> Any:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    if method == "SFT":
        data = Dataset.from_list([{"text": words(number, 3 + number)} for number in range(16)])
    else:
        pairs = preferences_of_several_lengths()
        data = Dataset.from_list([{**row, "prompt": f"{row['prompt']} w{copy}"} for copy in (40, 50) for row in pairs])
    settings = {"save_strategy": "steps", **settings}
    return tiny.trainer(
        tiny.stepwise(trainer_class),
        model=tiny.llama(folder, seed=0),
        args=tiny.config(
            config_class,
            output_dir=folder,
            max_steps=steps,
            gradient_accumulation_steps=MICRO_BATCHES,
            max_length=32,
            optim="sgd",
            learning_rate=0.1,
            **settings,
        ),
        train_dataset=data,
        tokenizer=tiny.tokenizer(),
        **({"ref_model": tiny.llama(folder, seed=1)} if method == "DPO" else {}),
    )


def _acts(trainer: Any, method: str) -> int | None:
    """Return how often an earlier epoch was refused."""
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}.get_train_dataloader", trainer)
        if acted is not None:
            return acted
    return None
