"""Train the real SFTTrainer two steps of two micro-batches on flattened batches, then evaluate.

The expected loss and gradients of a step are those of the mean cross-entropy of all its predictions, one sequence at a
time and without TRL's code: of flattened rows, without their prompts, of packed rows, and of a model that cannot be
given a mask.
"""

from __future__ import annotations

import dataclasses
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny
from tiny import flattened_runs
from tiny.flattened_runs import check, count_of, rows, sum_of

OVERLAYS = ()
PARITY = True
MUTANTS_ON = ("0.17.0",)
EQUIVALENT = {"applied twice": "the second time no batch is flattened, and the collator is as it is made"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "flattened": ("padding_free", {"padding_free": True}),
    "prompts": ("completion_only_loss", {"padding_free": True, "completion_only_loss": True}),
    "packed": ("packing_strategy", {"packing": True, "eval_packing": False}),
    "no mask": ("padding_free", {"padding_free": True}),
}
"""Each with the field of SFTConfig that a release needs for it."""


def two_steps(case: str, folder: str) -> Any:
    """Return a trainer that has trained and evaluated."""
    model = tiny.llama(folder, seed=0)
    if case == "no mask":
        (model.get_base_model() if hasattr(model, "get_base_model") else model).config.sliding_window = 4
    _, settings = CASES[case]
    return flattened_runs.two_steps(model, tiny.tokenizer(), prompts=case == "prompts", **settings)


def sum_of_one_sequence(model: Any, batch: Any) -> float:
    """Return the sum of the cross-entropy of all labels where each token attends to all before it."""
    import torch

    length = batch["input_ids"].shape[1]
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    positions = batch.get("position_ids", torch.arange(length)[None])
    with torch.no_grad():
        logits = model(batch["input_ids"], position_ids=positions, attention_mask=causal, use_cache=False).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1], batch["labels"][0, 1:], reduction="sum"))


def train() -> tiny.TrainingResult:
    from trl import SFTConfig

    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    if "padding_free" not in fields:
        return tiny.TrainingResult(absent("SFTConfig has no padding_free"))
    with tempfile.TemporaryDirectory() as folder:
        results = {case: result_of(case, folder) for case, (field, _) in CASES.items() if field in fields}
    verdicts = {result.outcome.verdict for result in results.values()}
    assert len(verdicts) == 1, {case: result.outcome for case, result in results.items()}
    return results["flattened"]


def result_of(case: str, folder: str) -> tiny.TrainingResult:
    trainer, model, prompt = two_steps(case, folder), tiny.llama(folder, seed=0), 2 if case == "prompts" else 1
    assert [len(step.micro_batches) for step in trainer.steps] == [2, 2]
    first = trainer.steps[0]
    model.load_state_dict(first.weights)
    count = count_of(first)
    loss = sum(one.loss for one in first.micro_batches)
    outcome = judge(
        loss,
        right=sum(float(sum_of(model, one.inputs, prompt).detach()) for one in first.micro_batches) / count,
        wrong=sum(sum_of_one_sequence(model, one.inputs) for one in first.micro_batches) / count,
        case=case,
    )
    if outcome.verdict.value == "fixed":
        check(trainer, model, prompt)
    return tiny.TrainingResult(outcome, loss, first.gradients)


def unaffected() -> tiny.TrainingResult:
    """Train on padded rows, with and without prompts, and on rows that are cut without regard to borders."""
    cut = {"packing": True, "packing_strategy": "wrapped", "max_length": 16}
    runs = {
        "padded": tiny.sft_step(rows()),
        "prompts": tiny.sft_step(rows(prompts=True), completion_only_loss=True),
        "workers": tiny.sft_step(rows(), dataloader_num_workers=1),
        "cut": tiny.sft_step(rows(), **cut),
    }
    return tiny.TrainingResult(absent("no batch is flattened"), *tiny.several(runs))
