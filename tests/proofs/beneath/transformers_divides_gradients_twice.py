"""Train two steps with the real trainers, of two micro-batches and of the one that the epoch ends with.

The gradients of each step are compared with those of the same rows in one micro-batch, which nobody divides. Nothing is
learned, so that the second step has the weights of the first in both.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge, module_of
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.data import labelled, preferences_of_several_lengths

ID = "transformers-divides-gradients-twice"
OVERLAYS = ()
PARITY = False

MICRO_BATCHES = 2
METHODS = ("SFT", "Reward", "GRPO", "RLOO", "DPO", "KTO")
"""SFT has its loss divided by the tokens of a step, the others by the micro-batches."""


def train() -> tiny.TrainingResult:
    runs = {method: _run(method) for method in _methods()}
    outcomes = [_judged(run, _run(method, accumulated=1)) for method, run in runs.items()]
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers do not agree: {dict(zip(runs, outcomes, strict=True))}")
    outcome = outcomes[0]
    told = {run.told for run in runs.values()}
    assert told in ({1}, {MICRO_BATCHES}), told
    for run in runs.values():
        acted = tiny.acts(ID, _target(run), run)
        micro_batches = sum(len(step.micro_batches) for step in run.steps)
        assert acted in (None, micro_batches if told == {MICRO_BATCHES} else 0), acted
    if told == {1}:
        assert outcome.verdict is Verdict.FIXED, outcome
        outcome = absent("this transformers tells accelerate of one micro-batch")
    return tiny.result_of_runs(runs, outcome)


def unaffected() -> tiny.TrainingResult:
    """Train without accumulation, and Online DPO, whose own step does not divide, with it."""
    runs = {method: _run(method, accumulated=1) for method in _methods()}
    result = tiny.result_of_runs(runs, absent("one micro-batch, or a step that does not divide"))
    if _online_dpo_trains():
        runs["OnlineDPO"], gradients = _online_dpo()
        result.gradients |= gradients
    acted = {method: tiny.acts(ID, _target(run), run) for method, run in runs.items()}
    assert not any(acted.values()), acted
    return result


def _methods() -> list[str]:
    """Return the methods whose trainer has a step of its own, but for Distillation, which needs more to train."""
    classes = {method: tiny.classes(method)[0] for method in METHODS}
    return [name for name, cls in classes.items() if module_of(cls.training_step).__name__ == cls.__module__]


def _run(method: str, *, accumulated: int = MICRO_BATCHES) -> Any:
    """Return a trainer that was trained for two steps: on six rows, evaluated too, or on eight completions each.

    ``told`` is the number of micro-batches that transformers told accelerate. What accelerate knows is for the process,
    and so of the trainer that was made last.
    """
    import torch

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        run = (_grpo if method in ("GRPO", "RLOO") else _on_rows)(method, folder, accumulated)
        run.told = run.accelerator.gradient_accumulation_steps
        run.train()
        if run.eval_dataset is not None:
            run.evaluate()
    return run


def _settings(rows: int, accumulated: int) -> dict[str, Any]:
    return {
        "per_device_train_batch_size": rows // accumulated,
        "gradient_accumulation_steps": accumulated,
        "max_steps": 2,
        "optim": "sgd",
        "learning_rate": 0.0,
    }


def _grpo(method: str, folder: str, accumulated: int) -> Any:
    trainer_class, config_class = tiny.classes(method)
    settings = {**_settings(8, accumulated), "steps_per_generation": accumulated, "beta": 0.0}
    return tiny.grpo(tiny.stepwise(trainer_class), tiny.llama(folder, seed=0), config_class, **settings)


def _on_rows(method: str, folder: str, accumulated: int) -> Any:
    trainer_class, config_class = tiny.classes(method)
    data = preferences_of_several_lengths().select(range(6))
    of_kto = {"loss_type": "apo_zero_unpaired"} if method == "KTO" else {}
    if method == "KTO":
        data = labelled(data.select(range(3)))
    elif method == "SFT":
        data = data.map(lambda row: {"text": row["prompt"] + row["chosen"]}).select_columns(["text"])
    policy = tiny.llama(folder, seed=0)
    return tiny.trainer(
        tiny.stepwise(trainer_class),
        model=_reward_model(folder) if method == "Reward" else policy,
        # The other losses of KTO have a mean over the micro-batch in them.
        args=tiny.config(config_class, **_settings(4, accumulated), max_length=32, **of_kto),
        train_dataset=data,
        eval_dataset=data,
        tokenizer=tiny.tokenizer(),
        **({"ref_model": tiny.llama(folder, seed=1)} if method in ("DPO", "KTO") else {}),
    )


def _reward_model(folder: str) -> Any:
    import torch
    from transformers import AutoModelForSequenceClassification

    torch.manual_seed(0)
    return AutoModelForSequenceClassification.from_pretrained(f"{folder}/llama-0", num_labels=1)


def _online_dpo_trains() -> bool:
    """Return whether this transformers has what Online DPO calls when it logs. 5.2 lacks it, and 0.27.2 calls it."""
    trainer_class, _ = tiny.classes("OnlineDPO")
    calls_it = "_nested_gather" in trainer_class._maybe_log_save_evaluate.__code__.co_names
    return not calls_it or hasattr(trainer_class, "_nested_gather")


def _online_dpo() -> tuple[Any, dict[str, Any]]:
    """Return a trainer that was trained for a step of two micro-batches, and the gradients of the first."""
    trainer_class, config_class = tiny.classes("OnlineDPO")
    with tempfile.TemporaryDirectory() as folder:
        policy = tiny.llama(folder, seed=0)
        step = tiny.FirstStep(policy)
        run = tiny.online_dpo(trainer_class, config_class, policy, gradient_accumulation_steps=MICRO_BATCHES)
        run.train()
    return run, {f"OnlineDPO {name}": gradient for name, gradient in step.gradients.items()}


def _judged(run: Any, whole: Any) -> Outcome:
    """Judge the gradients of both steps. They are of one kind, in each of their numbers."""
    outcomes = []
    for step, expected in zip(run.steps, whole.steps, strict=True):
        right = _projected(expected.gradients)
        outcome = judge(_projected(step.gradients), right=right, wrong=right / MICRO_BATCHES)
        factor = 1 if outcome.verdict is Verdict.FIXED else 1 / MICRO_BATCHES
        difference = step.difference({name: value * factor for name, value in expected.gradients.items()})
        assert difference < 1e-6, difference
        outcomes.append(outcome)
    if outcomes[0].verdict is not outcomes[1].verdict:
        raise AssertionError(f"the steps do not agree: {outcomes}")
    return outcomes[0]


def _projected(gradients: dict[str, Any]) -> float:
    import torch

    flat = torch.cat([gradients[name].flatten() for name in sorted(gradients)])
    return float((flat * torch.cos(torch.arange(len(flat)))).sum())


def _target(run: Any) -> str:
    defined_by = next(base for base in type(run).__mro__ if "training_step" in vars(base))
    return f"{defined_by.__module__}:{defined_by.__name__}.training_step"
