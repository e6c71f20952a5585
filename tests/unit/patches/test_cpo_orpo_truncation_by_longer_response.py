"""Each row is cut at the limit, and only rows without a response are dropped."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from datasets import Dataset, DatasetDict

from trl_hotfix.patches.preference import cpo_orpo_truncation_by_longer_response as patch

LIMIT = 8


def tokenised(prompt: int, chosen: int, rejected: int, *, rejected_prompt: int | None = None) -> dict[str, Any]:
    """Return a row with so many tokens. A tokenizer may merge the last one of a prompt with a response."""
    row: dict[str, Any] = {"prompt_input_ids": list(range(prompt))}
    for side, length, response in (
        ("chosen", prompt, chosen),
        ("rejected", prompt if rejected_prompt is None else rejected_prompt, rejected),
    ):
        ids = list(range(length + response))
        row[f"{side}_input_ids"] = ids
        row[f"{side}_attention_mask"] = [1] * len(ids)
        row[f"{side}_labels"] = [-100] * length + ids[length:]
    return row


class Trainer:
    """Has what ``tokenize_row`` of TRL leaves: no more than ``max_length`` tokens of a row."""

    is_encoder_decoder = False

    def __init__(self, train_dataset: Any = None, eval_dataset: Any = None) -> None:
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.max_length = LIMIT
        self.args = SimpleNamespace(dataset_num_proc=None)

    def tokenize_row(self, row: Any) -> Any:
        if row is None:
            raise ValueError("no row")
        names = [name for name in row if not name.startswith("prompt")]
        return row | {name: row[name][: self.max_length] for name in names}


def cut(trainer: Any, row: Any) -> tuple[Any, bool]:
    """Return what the wrapper returns, and whether it acts."""
    acts: list[int] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(patch, "act", lambda: acts.append(1))
        return patch.cut_each_row_at_the_limit(trainer.tokenize_row, trainer, (row,), {}), bool(acts)


@pytest.mark.parametrize(
    ("row", "kept", "acts"),
    [
        (tokenised(3, 5, 2), (8, 5), False),
        (tokenised(3, 6, 2), (8, 5), True),
        (tokenised(3, 2, 6), (5, 8), True),
        (tokenised(7, 2, 1), (8, 8), True),
        (tokenised(8, 1, 1), (8, 8), True),
        (tokenised(9, 1, 2), (9, 9), True),
        (tokenised(4, 3, 5, rejected_prompt=3), (7, 8), True),
        (tokenised(3, 5, 3, rejected_prompt=4), (8, 7), True),
    ],
)
def test_a_response_has_the_room_that_its_prompt_leaves(row: Any, kept: tuple[int, int], acts: bool) -> None:
    trainer = Trainer()
    before = {name: list(value) for name, value in row.items()}
    result, acted = cut(trainer, row)
    for side, length in zip(("chosen", "rejected"), kept, strict=True):
        for name in ("input_ids", "attention_mask", "labels"):
            assert result[f"{side}_{name}"] == before[f"{side}_{name}"][:length]
    assert result["prompt_input_ids"] == before["prompt_input_ids"]
    assert acted is acts
    assert trainer.max_length == LIMIT


def test_the_limit_is_put_back_after_an_error() -> None:
    trainer = Trainer()
    with pytest.raises(ValueError, match="no row"):
        cut(trainer, None)
    assert trainer.max_length == LIMIT


@pytest.mark.parametrize("reason", ["an encoder-decoder", "a TPU"])
def test_trl_cuts_where_it_does_so_itself(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = Trainer()
    if reason == "a TPU":
        monkeypatch.setattr(transformers.utils, "is_torch_xla_available", lambda *args: True)
    else:
        trainer.is_encoder_decoder = True
    seen: list[int] = []

    def tokenize_row(row: Any) -> Any:
        seen.append(trainer.max_length)
        return row

    row = tokenised(3, 6, 2)
    assert patch.cut_each_row_at_the_limit(tokenize_row, trainer, (row,), {}) is row
    assert seen == [LIMIT]
    assert len(row["chosen_labels"]) == 9


def made(train_dataset: Any, eval_dataset: Any = None) -> Trainer:
    trainer: Trainer = object.__new__(Trainer)
    init = trainer.__init__  # type: ignore[misc]
    patch.drop_rows_without_a_response(init, trainer, (train_dataset, eval_dataset), {})
    return trainer


def rows(*numbers: int) -> Dataset:
    """Return rows: 0 and 1 have both responses, 2 has no chosen one, and 3 no rejected one."""
    kinds = [tokenised(3, 5, 2), tokenised(7, 1, 1), tokenised(8, 0, 1), tokenised(8, 1, 0)]
    return Dataset.from_list([kinds[number] | {"number": number} for number in numbers])


def test_rows_without_a_response_are_dropped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trl_hotfix"):
        trainer = made(rows(0, 2, 1, 3), rows(3, 1))
    assert trainer.train_dataset["number"][:] == [0, 1]
    assert trainer.eval_dataset["number"][:] == [1]
    messages = [record.getMessage() for record in caplog.records]
    assert ["2 of 4 rows are dropped from the train" in message for message in messages] == [True, False]
    assert ["1 of 2 rows are dropped from the eval" in message for message in messages] == [False, True]
    assert all(f"max_length={LIMIT}" in message for message in messages)


@pytest.mark.parametrize("kind", [dict, DatasetDict])
def test_of_several_evaluation_sets_each_is_looked_at(kind: Any) -> None:
    whole = rows(0, 1)
    evaluation = made(whole, kind({"whole": whole, "other": rows(1, 2)})).eval_dataset
    assert type(evaluation) is kind
    assert evaluation["whole"] is whole
    assert evaluation["other"]["number"][:] == [1]


def test_datasets_with_responses_stay_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    training, evaluation = rows(0, 1), rows(1)
    trainer = made(training, evaluation)
    assert trainer.train_dataset is training
    assert trainer.eval_dataset is evaluation
    assert made(training).eval_dataset is None
    assert caplog.records == []


def test_rows_of_a_users_own_tokenize_row_stay() -> None:
    own = Dataset.from_list([{"chosen_labels": [-100]}])
    assert made(own).train_dataset is own


def test_dropping_acts_and_looking_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    acts: list[int] = []
    monkeypatch.setattr(patch, "act", lambda: acts.append(1))
    made(rows(0, 1), rows(1))
    assert acts == []
    made(rows(0, 2), rows(1))
    assert acts == [1]
