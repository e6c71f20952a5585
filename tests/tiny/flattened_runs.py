"""Two steps of SFT on flattened batches, and the loss of their sequences, one at a time and without TRL's code."""

from __future__ import annotations

import itertools
from typing import Any

from .steps import Step, expected_gradients, stepwise
from .trainers import config, trainer

LENGTHS = (5, 9, 3, 7, 4, 8, 6, 3)
FIRST = 40
"""Tokens from this one on begin a sequence, and each begins another one."""


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


def two_steps(model: Any, words: Any, *, prompts: bool = False, **settings: Any) -> Any:
    """Return a trainer that has trained and evaluated. ``trained_tokens`` is what it has counted."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dataset, packing = Dataset.from_list(rows(prompts=prompts)), settings.get("packing", False)
    # Four packed rows. 1.16.0 wants to be told that it need not cut the rows of a flattened batch.
    sizes = {"max_length": 12 if packing else None, "per_device_train_batch_size": 1 if packing else 2}
    sizes |= {"gradient_accumulation_steps": 2, "max_steps": 2, "completion_only_loss": False}
    made = trainer(
        stepwise(SFTTrainer),
        model=model,
        args=config(SFTConfig, **{**sizes, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        tokenizer=words,
    )
    made.train()
    made.trained_tokens = [log["num_tokens"] for log in made.state.log_history if "num_tokens" in log]
    made.evaluate()
    return made


def sequences(batch: Any) -> list[Any]:
    """Return the token ids of the sequences in a batch of one row."""
    (ids,) = batch["input_ids"]
    begins = [*(ids >= FIRST).nonzero()[:, 0].tolist(), len(ids)]
    return [ids[begin:end] for begin, end in itertools.pairwise(begins)]


def sum_of(model: Any, batch: Any, prompt: int = 1) -> Any:
    """Return the sum of the cross-entropy after the first ``prompt`` tokens of each sequence, one at a time."""
    import torch

    return sum(
        # Virtual tokens of PEFT have logits, too.
        torch.nn.functional.cross_entropy(
            model(sequence[None]).logits[0, -len(sequence) :][prompt - 1 : -1].float(),
            sequence[prompt:],
            reduction="sum",
        )
        for sequence in sequences(batch)
    )


def count_of(step: Step) -> int:
    """Return the number of items that transformers divides the loss by."""
    return int(step.micro_batches[0].keywords["num_items_in_batch"])


def check(made: Any, model: Any, prompt: int = 1) -> None:
    """Compare both steps and the evaluation with the formula."""
    for step in made.steps:
        predictions = sum(len(sequence) - prompt for one in step.micro_batches for sequence in sequences(one.inputs))
        assert count_of(step) == predictions, f"{count_of(step)} items are counted: expected {predictions}"
        expected = expected_gradients(
            model,
            step.weights,
            lambda model, step=step, predictions=predictions: (
                sum(sum_of(model, one.inputs, prompt) for one in step.micro_batches) / predictions
            ),
        )
        assert step.difference(expected) < 1e-5, f"gradients differ by {step.difference(expected)}"
    tokens = sum(one.inputs["input_ids"].numel() for step in made.steps for one in step.micro_batches)
    assert made.trained_tokens[-1] == tokens, f"{made.trained_tokens} are counted: expected {tokens}"
    model.load_state_dict(made.model.state_dict())
    for one in made.evaluations:
        right = float(sum_of(model, one.inputs, prompt).detach())
        right /= sum(len(sequence) - prompt for sequence in sequences(one.inputs))
        assert abs(one.loss - right) < 1e-5, f"an evaluation has the loss {one.loss}: expected {right}"
