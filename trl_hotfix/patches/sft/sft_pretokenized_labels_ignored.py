"""SFT has no use for the labels of rows that are tokenised already.

From 0.16.1 on the trainer has a collator of its own. ``torch_call`` takes the labels from ``input_ids``, and looks at
no column ``labels``. From 0.17.0 on ``_set_signature_columns_if_needed`` does not list that column, so that
``remove_unused_columns`` (on by default) drops it: the collator of ``padding_free``, which would read it, has none.

Pull request 3589 lists it in 0.19.0, and lets the collator take it; a completion mask is applied to it as before. The
wrappers do so, too: what TRL has left out of the loss stays out.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, argument, judge
from ...model import Outcome, Verdict
from ...testing import default_arguments, stub_trainer

_IGNORED = -100


def keep_the_labels(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """List the labels among the columns that the collator reads, if it is one that reads them."""
    from transformers import DataCollatorWithFlattening
    from trl.trainer import sft_trainer

    columns_unset = instance._signature_columns is None
    result = wrapped(*args, **kwargs)
    # Others may fail on labels that they have not been given so far.
    reading = (sft_trainer.DataCollatorForLanguageModeling, DataCollatorWithFlattening)
    if columns_unset and isinstance(instance.data_collator, reading):
        instance._signature_columns = [*instance._signature_columns, "labels"]
        # A stream may not know its columns.
        if "labels" in (getattr(instance.train_dataset, "column_names", None) or ()):
            act()
    return result


def train_on_the_labels(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Put the labels of the rows into the batch, except where TRL trains on nothing: the padding, and a prompt."""
    import torch

    batch = wrapped(*args, **kwargs)
    examples = argument(wrapped, args, kwargs, "examples")
    if "labels" not in examples[0]:
        return batch
    labels = torch.full_like(batch["labels"], _IGNORED)
    for example, row in zip(examples, labels, strict=True):
        given = torch.as_tensor(example["labels"])
        row[: len(given)] = given
    labels[batch["labels"] == _IGNORED] = _IGNORED
    return batch if torch.equal(labels, batch["labels"]) else {**batch, "labels": labels}


_TOKENS = [[5, 6, 7, 8, 9], [10, 4, 3], [8, 2, 5, 6]]
_LABELS = [[_IGNORED, _IGNORED, 7, _IGNORED, 9], [_IGNORED, 1, 3], [8, 2, _IGNORED, _IGNORED]]
"""The labels of the tokens, row by row. One of them is another token."""


def labels_are_trained(module: ModuleType) -> Outcome:
    """Collate rows with labels, and judge the sum of the batch's labels, each weighted by its place."""
    collator_class = module.DataCollatorForLanguageModeling
    if collator_class.__module__ != module.__name__:
        return absent("the collator of this release is that of transformers")
    rows = _rows(_TOKENS, _LABELS)
    batch = collator_class(pad_token_id=0)(rows)
    found, right, wrong = batch["labels"].tolist(), _padded(_LABELS), _padded(_TOKENS)
    outcome = judge(_weighted(found), right=_weighted(right), wrong=_weighted(wrong))
    is_fixed = outcome.verdict is Verdict.FIXED
    mistakes = []
    if found != (right if is_fixed else wrong) or batch["input_ids"].tolist() != _padded(_TOKENS, 0):
        mistakes.append(f"the batch is {batch}")
    if "_set_signature_columns_if_needed" in vars(module.SFTTrainer):
        columns = _columns(module, collator_class(pad_token_id=0))
        # From 0.19.0 on they are listed once.
        if columns.count("labels") != is_fixed or "input_ids" not in columns:
            mistakes.append(f"the columns are {columns}")
    if is_fixed:
        mistakes += [
            *_mistakes_elsewhere(collator_class),
            *_mistakes_of_the_collator(),
            *_mistakes_of_the_columns(module),
        ]
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return outcome


def _rows(tokens: list[list[int]], labels: list[list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": given} for ids, given in zip(tokens, labels, strict=True)]


def _padded(rows: list[list[int]], filler: int = _IGNORED, length: int = 5) -> list[list[int]]:
    return [row + [filler] * (length - len(row)) for row in rows]


def _weighted(rows: list[list[int]]) -> float:
    labels = [label for row in rows for label in row]
    return float(sum(place * label for place, label in enumerate(labels, 1) if label != _IGNORED))


def _columns(module: ModuleType, collator: Any) -> list[str]:
    """Return the columns that a trainer keeps of a dataset with labels, and asks for twice."""
    known = {"_is_vlm": False, "_is_vision_dataset": False, "_signature_columns": None}
    dataset = SimpleNamespace(column_names=["input_ids", "labels"])
    trainer = stub_trainer(
        module.SFTTrainer, default_arguments(module.SFTConfig), data_collator=collator, train_dataset=dataset, **known
    )
    for _ in range(2):
        trainer._set_signature_columns_if_needed()
    return list(trainer._signature_columns)


def _mistakes_elsewhere(collator_class: Any) -> list[str]:
    """Return what is wrong with rows without labels, and with labels beside a completion mask."""
    without = collator_class(pad_token_id=0)([{"input_ids": ids} for ids in _TOKENS])["labels"].tolist()
    mistakes = [f"without labels, they are {without}"] * (without != _padded(_TOKENS))
    # From 1.8.0 on the mask is applied where a dataset is prepared.
    if "completion_only_loss" in collator_class.__dataclass_fields__:
        masks = [[0, 0, 0, 1, 1], [0, 0, 1], [0, 1, 1, 1]]
        rows = [{**row, "completion_mask": mask} for row, mask in zip(_rows(_TOKENS, _LABELS), masks, strict=True)]
        labels = collator_class(pad_token_id=0)(rows)["labels"].tolist()
        expected = [
            [label if is_trained else _IGNORED for label, is_trained in zip(given, mask, strict=True)]
            for given, mask in zip(_LABELS, masks, strict=True)
        ]
        mistakes += [f"beside a mask, they are {labels}"] * (labels != _padded(expected))
    return mistakes


def _mistakes_of_the_collator() -> list[str]:
    """Return which batches the wrapper changes that are to stay, and what it makes of tensors and of more padding."""
    import torch

    def collate(examples: Any) -> Any:
        """Return a batch that is padded to a multiple of four."""
        tokens = [[*map(int, example["input_ids"])] for example in examples]
        batches.append({"input_ids": tokens, "labels": torch.tensor(_padded(tokens, length=8))})
        return batches[-1]

    batches: list[dict[str, Any]] = []
    rows = _rows(_TOKENS, _LABELS)
    tensors = [{name: torch.tensor(row[name]) for name in row} for row in rows]
    mistakes = []
    for name, args, kwargs in (
        ("lists", (rows,), {}),
        ("tensors", (tensors,), {}),
        ("named", (), {"examples": rows}),
        ("one row", (rows[:1],), {}),
    ):
        batch = train_on_the_labels(collate, None, args, kwargs)
        tokens = batch["input_ids"]
        if (
            batch["labels"].tolist() != _padded(_LABELS[: len(tokens)], length=8)
            or tokens is not batches[-1]["input_ids"]
        ):
            mistakes.append(f"{name}: the batch is {batch}")
    without = [{"input_ids": ids} for ids in _TOKENS]
    for name, rows in {
        "no labels": without,
        # TRL 0.19.0 asks the first row, too.
        "no labels in the first row": [without[0], *_rows(_TOKENS, _LABELS)[1:]],
        "the labels are the tokens": _rows(_TOKENS, _TOKENS),
    }.items():
        if train_on_the_labels(collate, None, (rows,), {}) is not batches[-1]:
            mistakes.append(f"{name}: the batch is another one")
    return mistakes


def _mistakes_of_the_columns(module: ModuleType) -> list[str]:
    """Return which collators get labels that are to have none, and which have none that are to get them."""
    from transformers import DataCollatorWithFlattening

    own = module.DataCollatorForLanguageModeling(pad_token_id=0)
    with_labels, without = (SimpleNamespace(column_names=names) for names in (["input_ids", "labels"], ["input_ids"]))
    usual: dict[str, Any] = {"train_dataset": with_labels, "_signature_columns": None}
    cases: dict[str, tuple[dict[str, Any], bool]] = {
        "TRL's collator": ({"data_collator": own}, True),
        "padding_free": ({"data_collator": DataCollatorWithFlattening()}, True),
        "no labels": ({"data_collator": own, "train_dataset": without}, True),
        "a stream": ({"data_collator": own, "train_dataset": SimpleNamespace(column_names=None)}, True),
        "the user's": ({"data_collator": list}, False),
        "known": ({"data_collator": own, "_signature_columns": ["input_ids"]}, False),
    }
    mistakes = []
    for name, (changed, has_labels) in cases.items():
        trainer = SimpleNamespace(**{**usual, **changed})

        def set_columns(trainer: Any = trainer) -> str:
            trainer._signature_columns = ["input_ids"]
            return "set"

        answer = keep_the_labels(set_columns, trainer, (), {})
        if answer != "set" or trainer._signature_columns != ["input_ids"] + ["labels"] * has_labels:
            mistakes.append(f"{name}: the columns are {trainer._signature_columns}")
    return mistakes
