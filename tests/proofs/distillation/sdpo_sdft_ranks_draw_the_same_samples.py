"""Two processes train two steps of two micro-batches with the real SDPO and SDFT: how many completions differ?

A group of 8 completions of one prompt lies on both. Each rank draws 4 tokens of a vocabulary of 64 for each, so all 16
completions of two groups should differ. This process is rank 0, so that what acts is seen; rank 1 is a fork of it.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny
from tiny.two_ranks import on_two_ranks

ID = "sdpo-sdft-ranks-draw-the-same-samples"
OVERLAYS = ()
PARITY = False
VARIANTS = "the random state is set when the trainer is made, whatever part of the model is compiled or trained"

TRAINERS = ("SDPO", "SDFT")
STEPS, MICRO_BATCHES, GROUP = 2, 2, 8
LENGTH = 4


def train() -> tiny.TrainingResult:
    if tiny.classes("SDPO")[0] is None:
        return tiny.TrainingResult(absent("this release has no SDPO and no SDFT"))
    runs = {name: on_two_ranks(lambda name=name: _trained(name, GROUP)) for name in TRAINERS}
    outcomes = {name: _judged([rank["completions"] for rank in ranks]) for name, ranks in runs.items()}
    if len({outcome.verdict for outcome in outcomes.values()}) != 1:
        raise AssertionError(f"the trainers do not agree: {outcomes}")
    for name, ranks in runs.items():
        assert ranks[0]["acted"] in (None, 1), (name, ranks[0]["acted"])
    return _result({name: ranks[0] for name, ranks in runs.items()}, outcomes["SDPO"])


def unaffected() -> tiny.TrainingResult:
    """Train in one process."""
    if tiny.classes("SDPO")[0] is None:
        return tiny.TrainingResult(absent("this release has no SDPO and no SDFT"))
    runs = {name: _trained(name, GROUP // 2) for name in TRAINERS}
    for name, run in runs.items():
        assert not run["acted"], name
        assert len(set(run["completions"])) == STEPS * GROUP // 2, name
    return _result(runs, absent("there is one process"))


def _judged(completions: list[list[tuple[int, ...]]]) -> Outcome:
    """Count the different completions of both ranks. With the bug those of rank 1 are those of rank 0."""
    first, second = completions
    assert len(first) == len(second) == STEPS * GROUP // 2, completions
    outcome = judge(len({*first, *second}), right=STEPS * GROUP, wrong=STEPS * GROUP // 2)
    assert (first == second) is (outcome.verdict is not Verdict.FIXED), completions
    return outcome


def _result(runs: dict[str, dict[str, Any]], outcome: Outcome) -> tiny.TrainingResult:
    gradients = {f"{name} {key}": value for name, run in runs.items() for key, value in run["gradients"].items()}
    return tiny.TrainingResult(outcome, sum(sum(run["losses"]) for run in runs.values()), gradients)


def _trained(name: str, group: int) -> dict[str, Any]:
    """Return the completions that the model has generated on this rank, in order, with losses and gradients."""
    from datasets import Dataset

    from tiny.data import left_padding_tokenizer

    trainer_class, config_class = tiny.classes(name)
    completions: list[tuple[int, ...]] = []
    rewards = {"reward_funcs": lambda completions, **kwargs: [float(len(text)) for text in completions]}
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
        generate = model.generate

        def noting(**options: Any) -> Any:
            ids = generate(**options)
            completions.extend(tuple(row) for row in ids[:, options["input_ids"].shape[1] :].tolist())
            return ids

        model.generate = noting
        trainer = tiny.trainer(
            tiny.stepwise(trainer_class),
            model=model,
            args=tiny.config(
                config_class,
                output_dir=folder,
                num_generations=group,
                gradient_accumulation_steps=MICRO_BATCHES,
                max_steps=STEPS,
                max_completion_length=LENGTH,
                max_prompt_length=16,
                optim="sgd",
                learning_rate=0.5,
                full_logit_distillation=True,
                distillation_topk=8,
                teacher_model_kind="live",
                teacher_regularization="none",
            ),
            train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3", "privileged_context": "w4 w5"}] * 4),
            tokenizer=left_padding_tokenizer(),
            **(rewards if name == "SDPO" else {}),
        )
        trainer.train()
    gradients = {
        f"{number} {key}": value for number, step in enumerate(trainer.steps) for key, value in step.gradients.items()
    }
    losses = [part.loss for step in trainer.steps for part in step.micro_batches]
    target = f"{trainer_class.__module__}:{name}Trainer.__init__"
    return {
        "completions": completions,
        "losses": losses,
        "gradients": gradients,
        "acted": tiny.acts(ID, target, trainer),
    }
