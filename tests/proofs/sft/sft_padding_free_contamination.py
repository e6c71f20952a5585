"""Train the real SFTTrainer two steps of two micro-batches on flattened batches, then evaluate.

The expected loss and gradients of a step are those of the mean cross-entropy of all its predictions, one sequence at a
time and without TRL's code: of flattened rows, without their prompts, of packed rows, and of a model that cannot be
given a mask.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True
MUTANTS_ON = ("0.17.0",)
EQUIVALENT = {"applied twice": "the second time no batch is flattened, and the collator is as it is made"}

LENGTHS = (5, 9, 3, 7, 4, 8, 6, 3)
FIRST = 40
"""Tokens from this one on begin a sequence, and each begins another one."""

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "flattened": ("padding_free", {"padding_free": True}),
    "prompts": ("completion_only_loss", {"padding_free": True, "completion_only_loss": True}),
    "packed": ("packing_strategy", {"packing": True, "eval_packing": False}),
    "no mask": ("padding_free", {"padding_free": True}),
}
"""Each with the field of SFTConfig that a release needs for it."""


def rows(*, prompts: bool = False) -> list[dict[str, list[int]]]:
    token_ids = [
        [FIRST + row, *[3 + (7 * row + 3 * place) % 37 for place in range(length - 1)]]
        for row, length in enumerate(LENGTHS)
    ]
    masks = {"completion_mask": [0, 0]} if prompts else {}
    return [
        {"input_ids": row, **{name: [*mask, *[1] * (len(row) - 2)] for name, mask in masks.items()}}
        for row in token_ids
    ]


def two_steps(case: str, folder: str) -> Any:
    """Return a trainer that has trained and evaluated. ``trained_tokens`` is what it has counted."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    _, settings = CASES[case]
    dataset = Dataset.from_list(rows(prompts=case == "prompts"))
    packing = settings.get("packing", False)
    # Four packed rows. 1.16.0 wants to be told that it need not cut the rows of a flattened batch.
    sizes = {"max_length": 12 if packing else None, "per_device_train_batch_size": 1 if packing else 2}
    sizes |= {"gradient_accumulation_steps": 2, "max_steps": 2, "completion_only_loss": False}
    model = tiny.llama(folder, seed=0)
    if case == "no mask":
        (model.get_base_model() if hasattr(model, "get_base_model") else model).config.sliding_window = 4
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, **{**sizes, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    trainer.trained_tokens = [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log]
    trainer.evaluate()
    return trainer


def sequences(batch: Any) -> list[Any]:
    """Return the token ids of the sequences in a batch of one row."""
    (ids,) = batch["input_ids"]
    begins = [*(ids >= FIRST).nonzero()[:, 0].tolist(), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(begins)]


def sum_of(model: Any, batch: Any, prompt: int) -> Any:
    """Return the sum of the cross-entropy after the first ``prompt`` tokens of each sequence, one at a time."""
    import torch

    return sum(
        torch.nn.functional.cross_entropy(
            model(sequence[None]).logits[0, prompt - 1 : -1].float(), sequence[prompt:], reduction="sum"
        )
        for sequence in sequences(batch)
    )


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


def count_of(step: tiny.Step) -> int:
    """Return the number of items that transformers divides the loss by."""
    return int(step.micro_batches[0].keywords["num_items_in_batch"])


def check(trainer: Any, model: Any, prompt: int) -> None:
    """Compare both steps and the evaluation with the formula."""
    for step in trainer.steps:
        predictions = sum(len(sequence) - prompt for one in step.micro_batches for sequence in sequences(one.inputs))
        assert count_of(step) == predictions, f"{count_of(step)} items are counted: expected {predictions}"
        expected = tiny.expected_gradients(
            model,
            step.weights,
            lambda model, step=step, predictions=predictions: (
                sum(sum_of(model, one.inputs, prompt) for one in step.micro_batches) / predictions
            ),
        )
        assert step.difference(expected) < 1e-5, f"gradients differ by {step.difference(expected)}"
    tokens = sum(one.inputs["input_ids"].numel() for step in trainer.steps for one in step.micro_batches)
    assert trainer.trained_tokens[-1] == tokens, f"{trainer.trained_tokens} are counted: expected {tokens}"
    model.load_state_dict(trainer.model.state_dict())
    for one in trainer.evaluations:
        right = float(sum_of(model, one.inputs, prompt).detach())
        right /= sum(len(sequence) - prompt for sequence in sequences(one.inputs))
        assert abs(one.loss - right) < 1e-5, f"an evaluation has the loss {one.loss}: expected {right}"


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
