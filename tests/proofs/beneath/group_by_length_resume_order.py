"""Train three epochs with the real SFT and DPO trainers, grouped by length, and resume from checkpoints.

One run goes on in the middle of its second epoch, and one in the middle of its third. The expected result is the run
without a stop: the order of its rows, the losses and gradients of its steps, and its weights in the end.
"""

from __future__ import annotations

import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from packaging.version import Version

from trl_hotfix.authoring import absent, judge

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "group-by-length-resume-order"
OVERLAYS = ()
PARITY = False
VARIANTS = "The order of the rows does not depend on the model, nor on how it is trained."

METHODS = ("SFT",)
MICRO_BATCHES, STEPS_OF_EPOCH = 2, 4
ROWS = MICRO_BATCHES * STEPS_OF_EPOCH
STEPS, STOPS = 3 * STEPS_OF_EPOCH, (6, 10)


def train() -> tiny.TrainingResult:
    if Version(version("transformers")) < Version("4.53"):
        return tiny.TrainingResult(absent("this transformers draws the orders of the epochs before again"))
    runs: dict[str, Any] = {}
    right = []
    for method in METHODS:
        whole, resumed = _runs(method, STEPS, STOPS)
        epochs = [_rows(whole)[begin : begin + ROWS] for begin in range(0, 3 * ROWS, ROWS)]
        assert len({str(epoch) for epoch in epochs}) == 3, "two epochs have the same order"
        assert _acts(whole, method) in (None, 1)
        for stop, run in resumed.items():
            right.append(_is_right(whole, run, stop))
            assert _acts(run, method) in (None, 1), f"{method} {stop}: it does not act"
            runs[f"{method} {stop}"] = run
    assert len(set(right)) == 1, right
    return tiny.result_of_runs(runs, judge(int(right[0]), right=1, wrong=0))


def unaffected() -> tiny.TrainingResult:
    """Resume a run whose rows are not grouped."""
    runs: dict[str, Any] = {}
    for method in METHODS:
        whole, resumed = _runs(method, STEPS_OF_EPOCH, (2,), grouped=False)
        assert _is_right(whole, resumed[2], 2), f"{method}: the resumed run has another order"
        assert not any(_acts(run, method) for run in (whole, resumed[2])), f"{method}: it acts"
        runs[method] = resumed[2]
    return tiny.result_of_runs(runs, absent("no run groups its rows"))


def _is_right(whole: Any, resumed: Any, stop: int) -> bool:
    """Return whether a run goes on like the one that was not stopped."""
    if _rows(resumed) != _rows(whole)[stop * MICRO_BATCHES :]:
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


def _runs(method: str, steps: int, stops: tuple[int, ...], *, grouped: bool = True) -> tuple[Any, dict[int, Any]]:
    """Train a run without a stop, and resume one from the checkpoint at each stop."""
    settings: dict[str, Any] = {"grouped": grouped}
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = _trainer(method, folder, steps, save_steps=2, **settings), {}
        whole.train()
        for stop in stops:
            checkpoint = Path(folder, f"checkpoint-{stop}")
            resumed[stop] = _trainer(method, folder, steps, save_strategy="no", **settings)
            resumed[stop].train(resume_from_checkpoint=str(checkpoint))
    return whole, resumed


def _trainer(method: str, folder: str, steps: int, *, grouped: bool, **settings: Any) -> Any:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    if grouped and "group_by_length" in config_class.__dataclass_fields__:
        settings["group_by_length"] = True
    elif grouped:
        settings["train_sampling_strategy"] = "group_by_length"
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
    """Return how many samplers were ordered."""
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}._get_train_sampler", trainer)
        if acted is not None:
            return acted
    return None
