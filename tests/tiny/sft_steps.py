"""Optimizer steps of the real SFTTrainer, compared with the cross-entropy of the tokens that they should train on."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .data import tokenizer
from .models import llama
from .steps import expected_gradients, stepwise
from .trainers import config, trainer

Row = tuple[list[int], list[int]]
"""The token ids of a sequence without padding, and their labels."""


def sft_steps(
    rows: list[dict[str, Any]],
    words: Any = None,
    *,
    streaming: bool = False,
    formatting_func: Any = None,
    **settings: Any,
) -> tuple[Any, Any]:
    """Return a trainer that has trained two steps of two micro-batches and evaluated, and a model for the formulas."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def dataset(rows: list[dict[str, Any]]) -> Any:
        return Dataset.from_list(rows).to_iterable_dataset() if streaming else Dataset.from_list(rows)

    sizes = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2}
    # 0.15 makes the config a part of the fingerprint of the dataset, so folders must not have new names each time.
    sizes |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    defaults = {"max_seq_length": 32, "max_length": 32, "dataset_text_field": "text", "optim": "sgd"}
    defaults["learning_rate"] = 0.5
    with tempfile.TemporaryDirectory() as folder:
        model, copy = (llama(folder, seed=0) for _ in range(2))
        sft_trainer = trainer(
            stepwise(SFTTrainer),
            model=model,
            args=config(SFTConfig, **{**defaults, **sizes, **settings}),
            train_dataset=dataset(rows),
            eval_dataset=dataset(rows[:2]),
            tokenizer=words if words is not None else tokenizer(),
            **({} if formatting_func is None else {"formatting_func": formatting_func}),
        )
        sft_trainer.train()
        sft_trainer.evaluate()
    return sft_trainer, copy


def judged_sft_steps(trainer: Any, model: Any, kinds: Mapping[str, Callable[[Row], Row]]) -> Any:
    """Judge the losses and the gradients of all steps, and those of the evaluation: they are all of one kind.

    ``kinds`` makes of a row that was trained on the right one, and the wrong one. ``model`` has the trainer's weights.
    """
    from trl_hotfix.authoring import judge
    from trl_hotfix.model import Verdict

    outcomes = []
    for step in trainer.steps:
        if len(step.micro_batches) != 2:
            raise AssertionError(f"a step has {len(step.micro_batches)} micro-batches")
        batches = {
            name: [[kind(row) for row in rows_of(micro_batch.inputs)] for micro_batch in step.micro_batches]
            for name, kind in kinds.items()
        }
        first = first_counted(step.micro_batches)
        counts = {name: sum(labels_in(rows, first) for rows in step_rows) for name, step_rows in batches.items()}
        model.load_state_dict(step.weights)
        for index, micro_batch in enumerate(step.micro_batches):
            losses = {name: float(cross_entropy(model, batches[name][index]) / counts[name]) for name in kinds}
            outcomes.append(judge(micro_batch.loss, **losses))

        def loss_of_step(name: str, model: Any, batches: Any = batches, counts: Any = counts) -> Any:
            return sum(cross_entropy(model, rows) for rows in batches[name]) / counts[name]

        differences = {
            name: step.difference(
                expected_gradients(model, step.weights, lambda model, name=name: loss_of_step(name, model))
            )
            for name in kinds
        }
        verdicts = {"right": Verdict.FIXED, "wrong": Verdict.REPRODUCED}
        of_gradients = [verdicts[name] for name, difference in differences.items() if difference < 1e-5]
        if of_gradients != [outcomes[-1].verdict]:
            raise AssertionError(f"the gradients differ by {differences}, the losses are {outcomes}")
    model.load_state_dict(trainer.model.state_dict())
    for evaluation in trainer.evaluations:
        rows = {name: [kind(row) for row in rows_of(evaluation.inputs)] for name, kind in kinds.items()}
        first = first_counted([evaluation])
        losses = {name: float(cross_entropy(model, rows[name]) / labels_in(rows[name], first)) for name in kinds}
        outcomes.append(judge(evaluation.loss, **losses))
    if len(trainer.steps) != 2 or not trainer.evaluations or len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"expected two steps and an evaluation of one kind: {outcomes}")
    return outcomes[0]


def first_counted(micro_batches: list[Any]) -> int:
    """Return 0 if the loss is divided by a count that has first tokens in it, as some releases of transformers do."""
    items = micro_batches[0].keywords.get("num_items_in_batch")
    trained = [row for micro_batch in micro_batches for row in rows_of(micro_batch.inputs)]
    return 1 if items is None or int(items) == labels_in(trained) else 0


def rows_of(batch: Mapping[str, Any]) -> list[Row]:
    """Return the sequences of a padded batch, without their padding."""
    # From 0.24 on some batches have no mask. No sequence has the padding token 0 in it.
    masks = batch.get("attention_mask", batch["input_ids"] != 0).bool()
    return [
        (ids[mask].tolist(), labels[mask].tolist())
        for ids, labels, mask in zip(batch["input_ids"], batch["labels"], masks, strict=True)
    ]


def labels_in(rows: list[Row], first: int = 1) -> int:
    """Return how many labels the rows have, from the one at ``first`` on. The first token of a row is not predicted."""
    return sum(label != -100 for _, labels in rows for label in labels[first:])


def cross_entropy(model: Any, rows: list[Row]) -> Any:
    """Return the sum of the cross-entropy of all labels, one row at a time."""
    import torch

    losses = []
    for ids, labels in rows:
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
        losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum"))
    return torch.stack(losses).sum()
