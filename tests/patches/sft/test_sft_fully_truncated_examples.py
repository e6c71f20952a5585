"""Rows without a label in what ``max_length`` leaves of them are dropped, and all others stay as TRL prepares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from trl import SFTConfig, SFTTrainer
from trl.trainer import sft_trainer

from trl_hotfix.testing import CharacterTokenizer, default_arguments, single_process, stream, stub_trainer

import tiny

LIMIT = 4
FIRST, LAST = slice(LIMIT), slice(-LIMIT, None)
MASKS = ("0011", "00001", "0101", "000000111", "1", "0000", "01111", "000110", "00000", "011100000")
"""The masks of rows. Of four nothing is left in the first ``LIMIT`` tokens, of three in the last."""

FIELDS = sft_trainer.DataCollatorForLanguageModeling.__dataclass_fields__
KNOWS_TURNS = "padding_free" in FIELDS
"""0.17 and 0.18 have no other mask than that of the completion, and do not read labels."""
MAKES_LABELS = KNOWS_TURNS and "completion_only_loss" not in FIELDS
"""From 1.7.0 on the labels are made while the dataset is prepared."""

Row = dict[str, Any]


def rows(column: str = "completion_mask", masks: tuple[str, ...] = MASKS) -> list[Row]:
    """Return rows of tokens, each of which is its own, and masks."""
    return [
        {"input_ids": [10 * number + place for place in range(len(mask))], column: list(map(int, mask))}
        for number, mask in enumerate(masks, 1)
    ]


def labelled() -> list[Row]:
    """Return the rows with labels instead of masks."""
    return [
        {"input_ids": ids, "labels": [token if bit else -100 for token, bit in zip(ids, mask, strict=True)]}
        for ids, mask in (row.values() for row in rows())
    ]


def tokens(rows: list[Row], kept: slice = FIRST) -> list[list[int]]:
    return [row["input_ids"][kept] for row in rows]


def with_a_label(rows: list[Row], kept: slice = FIRST) -> list[Row]:
    return [row for row in rows if any(row["completion_mask"][kept])]


def trainer_of(*, completion_only_loss: bool = True, **settings: Any) -> Any:
    usual = {"max_length": LIMIT, "packing_strategy": "wrapped", "shuffle_dataset": False}
    args = default_arguments(sft_trainer.SFTConfig, **{**usual, **settings})
    known = {"completion_only_loss": completion_only_loss, "chat_template": None, "_is_vlm": False}
    return stub_trainer(sft_trainer.SFTTrainer, args, _tokenizer=CharacterTokenizer(), **known)


def prepared(
    given: list[Row], *, packing: bool = False, make: Any = stream, trainer: Any = None, **settings: Any
) -> Any:
    """Return the tokens of rows as they are prepared, as far as they are kept."""
    trainer = trainer or trainer_of(**settings)
    args = trainer.args
    with single_process(sft_trainer):
        dataset = trainer._prepare_dataset(make(given), CharacterTokenizer(), args, packing, None, "train")
    kept = LAST if settings.get("truncation_mode") == "keep_end" else slice(args.max_length)
    return [row["input_ids"][kept] for row in dataset]


each_dataset = pytest.mark.parametrize("make", [Dataset.from_list, stream], ids=["a dataset", "a stream"])


@each_dataset
def test_each_dataset_has_the_rows_that_have_a_label(make: Any) -> None:
    for _ in range(2):
        trainer = trainer_of()
        assert prepared(rows(), make=make, trainer=trainer) == tokens(with_a_label(rows()))
        assert prepared(rows()[2:], make=make, trainer=trainer) == tokens(with_a_label(rows()[2:]))


@each_dataset
def test_trl_has_all_rows(make: Any, switch: Any) -> None:
    with switch.off():
        assert prepared(rows(), make=make) == tokens(rows())


@each_dataset
def test_a_dataset_of_rows_without_a_label_is_empty(make: Any) -> None:
    assert prepared([row for row in rows() if row not in with_a_label(rows())], make=make) == []


@each_dataset
def test_a_dataset_of_rows_with_a_label_is_whole(make: Any) -> None:
    assert prepared(with_a_label(rows()), make=make) == tokens(with_a_label(rows()))


def test_rows_of_assistants_without_a_turn_are_dropped() -> None:
    expected = with_a_label(rows()) if KNOWS_TURNS else rows()
    assert prepared(rows("assistant_masks"), completion_only_loss=False) == tokens(expected)


@pytest.mark.parametrize("completion_only_loss", [True, False])
def test_rows_of_labels_without_one_are_dropped(completion_only_loss: bool) -> None:
    expected = with_a_label(rows()) if KNOWS_TURNS else rows()
    assert prepared(labelled(), completion_only_loss=completion_only_loss) == tokens(expected)


def test_a_token_is_a_label_if_both_masks_say_so() -> None:
    both = [{**row, "assistant_masks": row["completion_mask"][::-1]} for row in rows()]
    in_both = [row for row in both if any(map(min, row["completion_mask"][FIRST], row["assistant_masks"][FIRST]))]
    assert len(in_both) < len(with_a_label(rows()))
    assert prepared(both) == tokens(in_both if KNOWS_TURNS else with_a_label(rows()))


def test_labels_that_a_row_has_count_beside_its_mask() -> None:
    if not KNOWS_TURNS:
        pytest.skip("this release does not read labels")
    row = {"input_ids": [1, 2], "labels": [-100, 2], "completion_mask": [1, 0]}
    # Where labels are made of masks, those that a row has are left as they are.
    assert prepared([row]) == ([[1, 2]] if MAKES_LABELS else [])


STAYS: dict[str, dict[str, Any]] = {
    "all tokens are trained": {"completion_only_loss": False},
    "nothing is cut": {"max_length": None},
    "rows are packed": {"packing": True},
}


@pytest.mark.parametrize("settings", STAYS.values(), ids=STAYS)
def test_all_rows_stay_where(settings: dict[str, Any], switch: Any) -> None:
    patched = prepared(rows(), **settings)
    with switch.off():
        assert patched == prepared(rows(), **settings)


def test_rows_without_masks_stay() -> None:
    without = [{"input_ids": row["input_ids"]} for row in rows()]
    assert prepared(without) == tokens(rows())


def test_rows_without_padding_stay_where_the_collator_does_not_cut_them() -> None:
    expected = with_a_label(rows()) if KNOWS_TURNS and "max_length" not in FIELDS else rows()
    assert prepared(rows(), padding_free=True) == tokens(expected)


def test_rows_are_looked_at_from_the_end_where_the_end_is_kept() -> None:
    if "truncation_mode" not in SFTConfig.__dataclass_fields__:
        pytest.skip("this release keeps the start of each row")
    assert prepared(rows(), truncation_mode="keep_end") == tokens(with_a_label(rows(), LAST), LAST)


@pytest.mark.parametrize("own", [False, True], ids=["TRL's collator", "a collator of the user's"])
def test_a_trainer_drops_rows_to_train_and_to_evaluate_unless_the_collator_is_the_users(
    own: bool, tmp_path: Path
) -> None:
    pairs = [{"prompt": "w1 " * count, "completion": "w2"} for count in (1, 5, 2, 6)]
    for _ in range(2):
        trainer = tiny.trainer(
            SFTTrainer,
            model=tiny.llama(str(tmp_path), seed=0),
            args=tiny.config(SFTConfig, max_steps=1, max_length=LIMIT),
            train_dataset=Dataset.from_list(pairs),
            eval_dataset={"one": Dataset.from_list(pairs[1:]), "two": Dataset.from_list(pairs[:1])},
            tokenizer=tiny.tokenizer(),
            data_collator=list if own else None,
        )
        datasets = (trainer.train_dataset, *trainer.eval_dataset.values())
        assert list(map(len, datasets)) == ([4, 3, 1] if own else [2, 1, 1])
