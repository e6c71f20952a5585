"""The labels of tokenised rows are trained on, and no other collator gets them."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening
from trl.trainer import sft_trainer

from trl_hotfix.testing import default_arguments, stub_trainer

import tiny

ID, MODULE = "sft-pretokenized-labels-ignored", "trl.trainer.sft_trainer"
SET_COLUMNS = f"{MODULE}:SFTTrainer._set_signature_columns_if_needed"
COLLATE = f"{MODULE}:DataCollatorForLanguageModeling.torch_call"

IGNORED = -100
TOKENS = [[5, 6, 7, 8, 9], [10, 4, 3], [8, 2, 5, 6]]
LABELS = [[IGNORED, IGNORED, 7, IGNORED, 9], [IGNORED, 1, 3], [8, 2, IGNORED, IGNORED]]
"""The labels of the tokens, row by row. One of them is another token."""
MASKS = [[0, 0, 0, 1, 1], [0, 0, 1], [0, 1, 1, 1]]

FIELDS = sft_trainer.DataCollatorForLanguageModeling.__dataclass_fields__

lists_columns = pytest.mark.skipif(
    "_set_signature_columns_if_needed" not in vars(sft_trainer.SFTTrainer),
    reason="this release keeps the columns that transformers keeps, which has the labels",
)


def rows(tokens: Sequence[list[int]], labels: Sequence[list[int]]) -> list[dict[str, Any]]:
    return [{"input_ids": ids, "labels": given} for ids, given in zip(tokens, labels, strict=True)]


def padded(rows: Sequence[list[int]], filler: int = IGNORED, length: int | None = None) -> list[list[int]]:
    length = max(map(len, rows)) if length is None else length
    return [row + [filler] * (length - len(row)) for row in rows]


def collator_of(**settings: Any) -> Any:
    return sft_trainer.DataCollatorForLanguageModeling(pad_token_id=0, **settings)


def test_each_batch_of_each_collator_has_the_labels_of_its_rows() -> None:
    collators = [collator_of(), collator_of()]
    for number in range(3):
        for collate in collators:
            chosen = slice(number, number + 2)
            batch = collate(rows(TOKENS[chosen], LABELS[chosen]))
            assert batch["labels"].tolist() == padded(LABELS[chosen])
            assert batch["input_ids"].tolist() == padded(TOKENS[chosen], 0)
            assert batch["attention_mask"].tolist() == padded([[1] * len(row) for row in TOKENS[chosen]], 0)


def test_an_evaluation_has_the_labels_of_its_rows() -> None:
    with torch.no_grad():
        batch = collator_of()(rows(TOKENS, LABELS))
    assert batch["labels"].tolist() == padded(LABELS)


def test_trl_trains_on_all_tokens(switch: Any) -> None:
    with switch.off():
        assert collator_of()(rows(TOKENS, LABELS))["labels"].tolist() == padded(TOKENS)


def test_labels_may_be_tensors() -> None:
    tensors = [{name: torch.tensor(row[name]) for name in row} for row in rows(TOKENS, LABELS)]
    assert collator_of()(tensors)["labels"].tolist() == padded(LABELS)


def test_the_rows_may_be_passed_by_name() -> None:
    assert collator_of().torch_call(examples=rows(TOKENS, LABELS))["labels"].tolist() == padded(LABELS)


def test_padding_to_a_multiple_has_no_labels() -> None:
    if "pad_to_multiple_of" not in FIELDS:
        pytest.skip("the collator of this release pads to no multiple")
    labels = collator_of(pad_to_multiple_of=8)(rows(TOKENS, LABELS))["labels"]
    assert labels.tolist() == padded(LABELS, length=8)


def test_a_completion_mask_leaves_out_more_labels() -> None:
    if "completion_only_loss" not in FIELDS:
        pytest.skip("the collator of this release knows no completion mask")
    examples = [{**row, "completion_mask": mask} for row, mask in zip(rows(TOKENS, LABELS), MASKS, strict=True)]
    expected = [
        [label if is_trained else IGNORED for label, is_trained in zip(labels, mask, strict=True)]
        for labels, mask in zip(LABELS, MASKS, strict=True)
    ]
    assert collator_of()(examples)["labels"].tolist() == padded(expected)


WITHOUT = [{"input_ids": ids} for ids in TOKENS]


@pytest.mark.parametrize(
    "examples",
    [WITHOUT, [WITHOUT[0], *rows(TOKENS, LABELS)[1:]], rows(TOKENS, TOKENS)],
    ids=["no labels", "no labels in the first row", "the labels are the tokens"],
)
def test_other_batches_are_those_of_trl(examples: list[dict[str, Any]]) -> None:
    with tiny.counted(ID, COLLATE) as counts:
        batch = collator_of()(examples)
        assert counts().acted == 0
    assert batch["labels"].tolist() == padded(TOKENS)


def test_a_changed_batch_counts_as_an_act() -> None:
    with tiny.counted(ID, COLLATE) as counts:
        collator_of()(rows(TOKENS, LABELS))
        collator_of()(WITHOUT)
        assert counts().acted == 1


def test_labels_must_be_as_many_as_the_tokens_of_their_row() -> None:
    with pytest.raises(RuntimeError):
        collator_of()(rows([[5, 6]], [[5, 6, 7]]))


def trainer_of(collator: Any, columns: Sequence[str] | None, own: list[str] | None = None) -> Any:
    """Return a trainer that has set its columns twice, since a dataloader of the evaluation asks again."""
    trainer = stub_trainer(
        sft_trainer.SFTTrainer,
        default_arguments(sft_trainer.SFTConfig),
        data_collator=collator,
        train_dataset=SimpleNamespace(column_names=columns),
        model=None,
        _signature_columns=own,
    )
    for _ in range(2):
        trainer._set_signature_columns_if_needed()
    return trainer


TOKENISED = ("input_ids", "labels")


@lists_columns
@pytest.mark.parametrize("collator", [collator_of(), DataCollatorWithFlattening()], ids=["TRL's", "padding_free"])
@pytest.mark.parametrize(
    ("columns", "acts"), [(TOKENISED, 1), (("input_ids",), 0), (None, 0)], ids=["labels", "no labels", "a stream"]
)
def test_the_labels_are_listed_once_beside_the_columns_of_trl(
    collator: Any, columns: Sequence[str] | None, acts: int, switch: Any
) -> None:
    with switch.off():
        unpatched = trainer_of(collator, columns)._signature_columns
    trainer = trainer_of(collator, columns)
    assert "labels" not in unpatched
    assert trainer._signature_columns == [*unpatched, "labels"]
    assert tiny.acts(ID, SET_COLUMNS, trainer) == acts


@lists_columns
def test_a_collator_of_the_users_gets_the_columns_of_trl(switch: Any) -> None:
    trainer = trainer_of(list, TOKENISED)
    with switch.off():
        unpatched = trainer_of(list, TOKENISED)
    assert trainer._signature_columns == unpatched._signature_columns
    assert tiny.acts(ID, SET_COLUMNS, trainer) == 0


@lists_columns
def test_columns_that_are_known_stay() -> None:
    trainer = trainer_of(collator_of(), TOKENISED, own=["input_ids"])
    assert trainer._signature_columns == ["input_ids"]
    assert tiny.acts(ID, SET_COLUMNS, trainer) == 0


@lists_columns
def test_each_of_two_trainers_lists_the_labels() -> None:
    trainers = [trainer_of(collator_of(), TOKENISED) for _ in range(2)]
    assert all(trainer._signature_columns.count("labels") == 1 for trainer in trainers)


@lists_columns
@pytest.mark.parametrize("purpose", ["training", "evaluation"])
def test_transformers_keeps_the_labels_of_a_dataset(purpose: str, switch: Any) -> None:
    dataset = Dataset.from_list([{**row, "other": 1} for row in rows(TOKENS, LABELS)])
    trainer = trainer_of(collator_of(), TOKENISED)
    assert trainer._remove_unused_columns(dataset, description=purpose).column_names == list(TOKENISED)
    with switch.off():
        trainer = trainer_of(collator_of(), TOKENISED)
        assert trainer._remove_unused_columns(dataset, description=purpose).column_names == ["input_ids"]
