"""Train an AdaLoRA adapter for three steps of two micro-batches of unequal length with SFT and DPO.

After each step the weights are those of AdaLoRA's formulas, computed here from the weights and gradients before it: an
average of the importance of each weight, of its changes, and the ranks that these leave. SFT is also resumed before the
last step, and ends with the same weights.
"""

from __future__ import annotations

import tempfile
from importlib import metadata
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge
from trl_hotfix.matching.versions import in_range

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.gkd_steps import words

ID = "adalora-never-prunes"
OVERLAYS = ()
PARITY = False
EQUIVALENT = {
    "applied twice": "a trainer gets the callback once",
    "_Allocation: `step == self._last and self._newest is not None` -> `self._newest is not None`": (
        "PEFT drops its averages in the last allocation, so there is no newest one after it"
    ),
    "_Allocation: `def after_step(self, step: int, *, was_skipped: bool) -> None:` -> "
    "`def after_step(self, step: int, /, was_skipped: bool) -> None:`": "the callback gives the step by place",
}
VARIANTS = {"lora": "what is pruned is an AdaLoRA adapter", "full": "what is pruned is an AdaLoRA adapter"}

METHODS = ("SFT", "DPO")
BETA_1, BETA_2, RATE, STEPS = 0.85, 0.75, 0.5, 3
MATRICES, INITIAL_RANK, TARGET_RANK = 4, 4, 2
BUDGETS = (MATRICES * INITIAL_RANK, MATRICES * TARGET_RANK, MATRICES * TARGET_RANK)
"""How many ranks remain after each step: the first one is before all allocation, and the third one behind it."""


def train() -> tiny.TrainingResult:
    if not in_range(metadata.version("trl"), ">=0.24.0"):
        return tiny.TrainingResult(absent("the trainers have no base in TRL"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    count, runs = 0, {}
    for method in METHODS:
        with tempfile.TemporaryDirectory() as folder:
            runs[method] = run = trained(method, folder)
            weights = [adapter(step.weights) for step in run.steps] + [adapter(run.model.state_dict())]
            gradients = [adapter(step.gradients) for step in run.steps]
            assert all(gradient.any() for gradient in gradients[1].values()), method
            if patched:
                for number, expected in enumerate(allocated(weights[0], gradients), start=1):
                    assert difference(weights[number], expected) < 1e-6, (method, number)
                assert _acts(run) in (None, 1)
            if method == "SFT":
                resumed = trained(method, folder, resumes=True)
                assert difference(adapter(resumed.model.state_dict()), weights[-1]) == 0, "resumed otherwise"
            assert run.model.peft_config["default"].rank_pattern is None
            count += ranks(weights[-1])
    wrong = len(METHODS) * MATRICES * INITIAL_RANK
    return tiny.result_of_runs(runs, judge(count, right=len(METHODS) * BUDGETS[-1], wrong=wrong))


def unaffected() -> tiny.TrainingResult:
    """Train LoRA, AdaLoRA whose target is its rank, and AdaLoRA with a callback that makes the call itself."""
    from transformers import TrainerCallback

    class Allocate(TrainerCallback):  # type: ignore[misc]
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            kwargs["model"].base_model.update_and_allocate(state.global_step + 1)

    cases: tuple[tuple[str, dict[str, Any]], ...] = (
        ("SFT", {"peft_config": tiny.lora()}),
        ("DPO", {"peft_config": adalora(target_r=INITIAL_RANK)}),
        ("SFT", {"callback": Allocate()}),
    )
    runs = {}
    for number, (method, arguments) in enumerate(cases):
        with tempfile.TemporaryDirectory() as folder:
            runs[f"{number}"] = run = trained(method, folder, **arguments)
        assert not _acts(run), (method, arguments)
    assert ranks(adapter(run.model.state_dict())) == BUDGETS[-1]
    return tiny.result_of_runs(runs, absent("nothing is pruned, or the user's callback prunes it"))


def adapter(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: value.clone() for name, value in tensors.items() if "lora_" in name}


def ranks(weights: dict[str, Any]) -> int:
    return sum(int((value != 0).sum()) for name, value in weights.items() if "lora_E" in name)


def difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def allocated(weights: dict[str, Any], gradients: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the weights after each step of plain SGD and the allocation of ranks behind it."""
    import torch

    average = {name: torch.zeros_like(value) for name, value in weights.items()}
    change = {name: torch.zeros_like(value) for name, value in weights.items()}
    steps, is_pruned = [], {}
    for number, gradient in enumerate(gradients):
        weights = {name: value - RATE * gradient[name] for name, value in weights.items()}
        if number < 1:
            for name, value in weights.items():
                importance = (value * gradient[name]).abs()
                average[name] = BETA_1 * average[name] + (1 - BETA_1) * importance
                change[name] = BETA_2 * change[name] + (1 - BETA_2) * (importance - average[name]).abs()
        if number == 1:
            is_pruned = least_important({name: average[name] * change[name] for name in weights}, BUDGETS[number])
        for name, places in is_pruned.items():
            weights[name][places] = 0
        steps.append(weights)
    return steps


def least_important(scores: dict[str, Any], budget: int) -> dict[str, Any]:
    """Return for each vector of singular values the places that are not among the ``budget`` best of all."""
    import torch

    totals = {}
    for name, score in scores.items():
        if "lora_E" in name:
            of_rows = scores[name.replace("lora_E", "lora_A")].mean(1)
            of_columns = scores[name.replace("lora_E", "lora_B")].mean(0)
            totals[name] = score.flatten() + of_rows + of_columns
    best = torch.cat(list(totals.values())).sort(descending=True).values[budget - 1]
    return {name: total < best for name, total in totals.items()}


def adalora(**settings: Any) -> Any:
    from peft import AdaLoraConfig

    schedule = {"init_r": INITIAL_RANK, "target_r": TARGET_RANK, "total_step": STEPS, "tinit": 1, "tfinal": 1}
    averages = {"beta1": BETA_1, "beta2": BETA_2}
    matrices = {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}
    return AdaLoraConfig(**{**schedule, **averages, **matrices, **settings})


def trained(method: str, folder: str, *, resumes: bool = False, callback: Any = None, **arguments: Any) -> Any:
    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes(method)
    settings: dict[str, Any] = {
        "max_steps": STEPS,
        "gradient_accumulation_steps": 2,
        "learning_rate": RATE,
        "optim": "sgd",
        "save_strategy": "steps",
        "save_steps": 1,
        "output_dir": f"{folder}/run",
    }
    arguments = {"peft_config": adalora(), **arguments}
    model = tiny.llama(folder, seed=0)
    # An adapter begins at random.
    torch.manual_seed(1 if resumes else 0)
    data = (
        Dataset.from_list([{"text": words(number, 3 + number)} for number in range(8)])
        if method == "SFT"
        else preferences_of_several_lengths()
    )
    trainer = tiny.trainer(
        tiny.stepwise(trainer_class),
        model=model,
        args=tiny.config(config_class, max_length=32, **settings),
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        tokenizer=tiny.tokenizer(),
        **arguments,
    )
    if callback is not None:
        trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=f"{folder}/run/checkpoint-{STEPS - 1}" if resumes else None)
    trainer.evaluate()
    return trainer


def _acts(trainer: Any) -> int | None:
    for base in type(trainer).__mro__:
        acted = tiny.acts(ID, f"{base.__module__}:{base.__name__}.create_optimizer", trainer)
        if acted is not None:
            return acted
    return None
