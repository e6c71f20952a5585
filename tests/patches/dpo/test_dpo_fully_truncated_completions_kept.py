"""DPO and KTO train on the rows whose prompt leaves room for an answer, and on all rows where nothing is cut."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.authoring import module_of
from trl_hotfix.testing import constructed, default_arguments, single_process, tiny_attention_model

import tiny

LIMIT, BATCH, EOS = 4, 3, 1
PROMPT_LENGTHS = (2, 4, 3, 1, 5, 2, 7, 2)
"""In words. Three of the prompts have ``LIMIT`` or more."""

Row = dict[str, Any]


@pytest.fixture(params=["DPO", "KTO"])
def method(request: pytest.FixtureRequest) -> Any:
    trainer_class, _ = tiny.classes(request.param)
    if not hasattr(trainer_class, "_prepare_dataset") or hasattr(trainer_class, "tokenize_row"):
        pytest.skip("in this release the trainer cuts prompts at max_prompt_length")
    return request.param


def words(first: int, count: int) -> str:
    return " ".join(f"w{(first + 7 * place) % 58}" for place in range(count))


def rows_of(method: str, lengths: Sequence[int] = PROMPT_LENGTHS) -> list[Row]:
    """Return a row for each length of a prompt. No two answers are the same."""
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        row = {"prompt": words(index, length)}
        chosen, rejected = f" {words(10 + index, 1 + index % 3)}", f" {words(30 + index, 1 + index % 4)}"
        answers = {"chosen": chosen, "rejected": rejected}
        rows.append(row | (answers if method == "DPO" else {"completion": chosen, "label": index % 2 == 0}))
    return rows


def tokenised(rows: list[Row], limit: int | None) -> list[Row]:
    """Return the token ids of the rows whose prompt is shorter than ``limit``, or of all.

    The completion for KTO's KL divergence is that of the row before, in batches of ``BATCH`` rows.
    """
    kept = [
        {f"{name}_ids": ids(row[name], ends=name != "prompt") for name in row if name != "label"}
        for row in rows
        if limit is None or len(row["prompt"].split()) < limit
    ]
    for begin in range(0, len(kept), BATCH):
        batch = kept[begin : begin + BATCH]
        for row, before in zip(batch, [batch[-1], *batch[:-1]], strict=True):
            if "completion_ids" in row:
                row["KL_completion_ids"] = before["completion_ids"]
    return kept


def ids(text: str, *, ends: bool) -> list[int]:
    return tiny.tokenizer()(text)["input_ids"] + [EOS] * ends


def made(method: str, rows: Any = None, evaluation: dict[str, Any] | None = None, **arguments: Any) -> Any:
    """Return a trainer that has prepared ``rows`` to train on, by default all. ``data_collator`` is an argument too."""
    trainer_class, config_class = tiny.classes(method)
    # TRL reports each of its trainers to the hub.
    quiet = type(trainer_class.__name__, (trainer_class,), {"_send_telemetry": lambda self: None})
    usual: dict[str, Any] = {"max_length": LIMIT, "n_gpu": 1, "process_index": 0, "per_device_train_batch_size": BATCH}
    usual["accelerator_config"] = SimpleNamespace(dispatch_batches=None)
    collator = arguments.pop("data_collator", None)
    with single_process(module_of(trainer_class._prepare_dataset)):
        return constructed(
            quiet,
            model=tiny_attention_model(),
            ref_model=tiny_attention_model(),
            args=default_arguments(config_class, **{**usual, **arguments}),
            data_collator=collator,
            train_dataset=dataset(rows_of(method) if rows is None else rows),
            eval_dataset={name: dataset(split) for name, split in (evaluation or {}).items()} or None,
            processing_class=tiny.tokenizer(),
        )


def dataset(rows: Any) -> Any:
    return Dataset.from_list(rows) if isinstance(rows, list) else rows


def ids_in(prepared: Any) -> list[Row]:
    return [{name: value for name, value in row.items() if name.endswith("_ids")} for row in prepared]


def test_rows_without_room_are_dropped_in_training_and_in_evaluation(method: str) -> None:
    given = rows_of(method)
    trainer = made(method, evaluation={"same": given, "others": given[2:6]})
    assert ids_in(trainer.train_dataset) == tokenised(given, LIMIT)
    assert ids_in(trainer.eval_dataset["same"]) == tokenised(given, LIMIT)
    assert ids_in(trainer.eval_dataset["others"]) == tokenised(given[2:6], LIMIT)


def test_trl_keeps_rows_without_room(method: str, switch: Any) -> None:
    given = rows_of(method)
    with switch.off():
        trainer = made(method, evaluation={"same": given, "others": given[2:6]})
    assert ids_in(trainer.train_dataset) == tokenised(given, None)
    assert ids_in(trainer.eval_dataset["same"]) == tokenised(given, None)
    assert ids_in(trainer.eval_dataset["others"]) == tokenised(given[2:6], None)


def test_the_rows_that_are_left_are_trls(method: str, switch: Any) -> None:
    given = rows_of(method)
    patched = list(made(method).train_dataset)
    with switch.off():
        unpatched = list(made(method, [row for row in given if len(row["prompt"].split()) < LIMIT]).train_dataset)
    assert patched == unpatched


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 7, 8])
def test_a_prompt_of_one_token_less_than_max_length_has_room(method: str, limit: int) -> None:
    given = rows_of(method)
    assert ids_in(made(method, max_length=limit).train_dataset) == tokenised(given, limit)


def test_a_dataset_may_keep_all_rows_or_none(method: str) -> None:
    short, long = rows_of(method, (1, 2, 3)), rows_of(method, (4, 5))
    trainer = made(method, evaluation={"short": short, "long": long})
    assert ids_in(trainer.eval_dataset["short"]) == tokenised(short, LIMIT)
    assert ids_in(trainer.eval_dataset["long"]) == []


def test_a_stream_has_the_rows_with_room(method: str) -> None:
    given = rows_of(method)
    trainer = made(method, dataset(given).to_iterable_dataset(), {"stream": dataset(given[2:]).to_iterable_dataset()})
    assert ids_in(trainer.train_dataset) == tokenised(given, LIMIT)
    assert ids_in(trainer.eval_dataset["stream"]) == tokenised(given[2:], LIMIT)


def test_without_max_length_no_row_is_dropped(method: str) -> None:
    given = rows_of(method, (600, *PROMPT_LENGTHS))
    trainer = made(method, given, max_length=None)
    # KTO of 1.3.0 then has a limit of its own, 512.
    assert ids_in(trainer.train_dataset) == tokenised(given, vars(trainer).get("max_length"))


def test_where_the_end_is_kept_no_row_is_dropped(method: str) -> None:
    if "truncation_mode" not in tiny.classes(method)[1].__dataclass_fields__:
        pytest.skip("this trainer keeps the start alone")
    assert ids_in(made(method, truncation_mode="keep_end").train_dataset) == tokenised(rows_of(method), None)


def test_what_a_collator_of_the_users_is_given_is_not_dropped(method: str) -> None:
    given = rows_of(method)
    for collator in (list, None, list):
        trainer = made(method, evaluation={"same": given}, data_collator=collator)
        # Up to 1.0.0rc1 DPO's trainer cuts what any collator returns.
        limit = None if collator and not hasattr(trainer, "_truncate_inputs") else LIMIT
        assert ids_in(trainer.train_dataset) == tokenised(given, limit)
        assert ids_in(trainer.eval_dataset["same"]) == tokenised(given, limit)


def test_worker_processes_prepare_the_same_rows(method: str) -> None:
    assert ids_in(made(method, dataset_num_proc=2).train_dataset) == tokenised(rows_of(method), LIMIT)
