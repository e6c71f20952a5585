"""Each row is cut at ``max_length``, and only rows without a response are dropped."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from datasets import Dataset, DatasetDict

from trl_hotfix.authoring import module_of
from trl_hotfix.call import Call
from trl_hotfix.patches.preference.cpo_orpo_truncation_by_longer_response import drop_rows_without_a_response
from trl_hotfix.testing import (
    CharacterTokenizer,
    constructed,
    default_arguments,
    dpo_stub,
    single_process,
    tiny_causal_lm,
)

import tiny

ID, LIMIT = "cpo-orpo-truncation-by-longer-response", 8

Row = dict[str, Any]


@pytest.fixture(params=["CPO", "ORPO"])
def method(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class MergingTokenizer(CharacterTokenizer):
    """Make one token of ``bc``."""

    def __call__(self, text: str, **kwargs: Any) -> Any:
        return super().__call__(text.replace("bc", "\2"), **kwargs)


def trainer_of(method: str, **attributes: Any) -> Any:
    trainer_class, _ = tiny.classes(method)
    defaults = {"max_length": LIMIT, "processing_class": MergingTokenizer()}
    return dpo_stub(module_of(trainer_class.__init__), method, **{**defaults, **attributes})


def acts(method: str, trainer: Any, attribute: str = "tokenize_row") -> int | None:
    trainer_class, _ = tiny.classes(method)
    return tiny.acts(ID, f"{trainer_class.__module__}:{method}Trainer.{attribute}", trainer)


@contextmanager
def two_lengths() -> Iterator[None]:
    """Skip where TRL refuses a prompt that has another number of tokens in front of the other response."""
    try:
        yield
    except ValueError as error:
        if "zip() argument" not in str(error):
            raise
        pytest.skip("this release refuses a prompt of two lengths")


def pair(prompt: int, chosen: int, rejected: int) -> Row:
    """Return a pair whose prompt and responses have so many tokens. TRL adds the last one of a response."""
    return {"prompt": "p" * prompt, "chosen": "c" * (chosen - 1), "rejected": "r" * (rejected - 1)}


def texts(row: Row) -> tuple[str, str]:
    """Return the sequences. Labels and masks fit them, and the prompt is no label."""
    for side in ("chosen", "rejected"):
        ids, labels = row[f"{side}_input_ids"], row[f"{side}_labels"]
        prompt = labels.count(-100)
        assert labels == [-100] * prompt + ids[prompt:]
        assert row[f"{side}_attention_mask"] == [1] * len(ids)
    chosen, rejected = ("".join(map(chr, row[f"{side}_input_ids"])) for side in ("chosen", "rejected"))
    return chosen, rejected


@pytest.mark.parametrize(
    ("row", "expected", "is_cut"),
    [
        (pair(3, 5, 2), ("pppcccc\1", "pppr\1"), False),
        (pair(3, 6, 2), ("pppccccc", "pppr\1"), True),
        (pair(3, 2, 6), ("pppc\1", "ppprrrrr"), True),
        (pair(3, 9, 9), ("pppccccc", "ppprrrrr"), True),
        (pair(7, 2, 1), ("pppppppc", "ppppppp\1"), True),
        # The prompt fills the limit, and stays whole.
        (pair(8, 1, 1), ("pppppppp", "pppppppp"), True),
        (pair(9, 2, 3), ("p" * 9, "p" * 9), True),
        # A token of the prompt belongs to one response.
        ({"prompt": "xyab", "chosen": "cde", "rejected": "fghi"}, ("xya\2de\1", "xyabfghi"), True),
        ({"prompt": "xyab", "chosen": "fghi", "rejected": "cd"}, ("xyabfghi", "xya\2d\1"), True),
    ],
)
def test_a_response_has_the_room_that_its_prompt_leaves(
    method: str, row: Row, expected: tuple[str, str], is_cut: bool
) -> None:
    trainer = trainer_of(method)
    with two_lengths():
        tokenised = trainer.tokenize_row(row)
    assert texts(tokenised) == expected
    assert "".join(map(chr, tokenised["prompt_input_ids"])) == row["prompt"][: len(tokenised["prompt_input_ids"])]
    assert acts(method, trainer) == int(is_cut)
    assert trainer.max_length == LIMIT


def test_trl_cuts_by_the_longer_response(method: str, switch: Any) -> None:
    with switch.off():
        assert texts(trainer_of(method).tokenize_row(pair(3, 6, 2))) == ("pppcc", "pppr\1")
        assert texts(trainer_of(method).tokenize_row(pair(3, 9, 2)))[1] in ("pppr", "ppp")


def test_each_row_of_each_trainer_is_cut_at_its_own_limit(method: str) -> None:
    trainers = [trainer_of(method), trainer_of(method, max_length=6)]
    for _ in range(2):
        assert [texts(trainer.tokenize_row(pair(3, 6, 2)))[0] for trainer in trainers] == ["pppccccc", "pppccc"]
        assert [texts(trainer.tokenize_row(pair(2, 3, 2)))[0] for trainer in trainers] == ["ppcc\1"] * 2
    assert [trainer.max_length for trainer in trainers] == [LIMIT, 6]


def test_the_limit_is_put_back_after_an_error(method: str) -> None:
    trainer = trainer_of(method)
    with pytest.raises(ValueError, match="prompt should be an str"):
        trainer.tokenize_row({"prompt": 1, "chosen": "c", "rejected": "r"})
    assert trainer.max_length == LIMIT


@pytest.mark.parametrize("reason", ["an encoder-decoder", "a TPU"])
def test_trl_cuts_where_it_does_so_itself(
    method: str, reason: str, monkeypatch: pytest.MonkeyPatch, switch: Any
) -> None:
    is_encoder_decoder = reason == "an encoder-decoder"
    if not is_encoder_decoder:
        monkeypatch.setattr(transformers.utils, "is_torch_xla_available", lambda *args: True)
    attributes = {"is_encoder_decoder": is_encoder_decoder, "max_completion_length": 4}
    trainer = trainer_of(method, **attributes)
    row = trainer.tokenize_row(pair(3, 6, 2))
    assert acts(method, trainer) == 0
    with switch.off():
        assert trainer_of(method, **attributes).tokenize_row(pair(3, 6, 2)) == row


def made(method: str, train: Any, evaluation: Any = None, *, trainer_class: Any = None, tokenizer: Any = None) -> Any:
    """Return a trainer whose constructor has prepared these datasets."""
    _, config_class = tiny.classes(method)
    trainer_class = trainer_class or tiny.classes(method)[0]
    config = SimpleNamespace(is_encoder_decoder=False, model_type="", get_text_config=SimpleNamespace)
    model = tiny_causal_lm(config)
    model.warnings_issued, model.generation_config = {}, SimpleNamespace()
    settings = {"max_length": LIMIT, "remove_unused_columns": False, "gradient_checkpointing": False}
    with single_process(module_of(trainer_class.__init__)):
        return constructed(
            trainer_class,
            model=model,
            args=default_arguments(config_class, **settings),
            train_dataset=train,
            eval_dataset=evaluation,
            processing_class=tokenizer or CharacterTokenizer(),
        )


KINDS = (pair(3, 5, 2), pair(7, 1, 9), pair(8, 1, 2), pair(9, 3, 1))
"""Of the last two the prompt fills the limit."""


def rows(*kinds: int) -> Dataset:
    return Dataset.from_list([{**KINDS[kind], "kind": kind} for kind in kinds])


def kinds_of(dataset: Any) -> list[int]:
    return [row["kind"] for row in dataset]


def test_rows_without_a_response_are_dropped_with_a_warning(method: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "trl_hotfix"):
        trainer = made(method, rows(0, 2, 1, 3), rows(3, 1))
    assert kinds_of(trainer.train_dataset) == [0, 1]
    assert kinds_of(trainer.eval_dataset) == [1]
    messages = [record.getMessage() for record in caplog.records if record.name == "trl_hotfix"]
    assert ["2 of 4 rows are dropped from the train" in message for message in messages] == [True, False]
    assert ["1 of 2 rows are dropped from the eval" in message for message in messages] == [False, True]
    assert all(f"max_length={LIMIT}" in message for message in messages)
    assert acts(method, trainer, "__init__") == 1


def test_trl_keeps_rows_without_a_response(method: str, switch: Any) -> None:
    with switch.off():
        assert kinds_of(made(method, rows(0, 2)).train_dataset) == [0, 2]


def test_the_rows_that_are_left_are_cut_at_the_limit(method: str) -> None:
    first, second = made(method, rows(0, 1, 2)).train_dataset
    assert texts(first) == ("pppcccc\1", "pppr\1")
    assert texts(second) == ("ppppppp\1", "pppppppr")


@pytest.mark.parametrize("sides", [("chosen", "rejected"), ("rejected", "chosen")])
def test_a_row_without_one_of_its_responses_is_dropped(method: str, sides: tuple[str, str]) -> None:
    # The prompt of one side may have a token less: it is that of a response.
    trained, other = sides
    row = {"prompt": "pppppppb", trained: "c", other: "r", "kind": 2}
    dataset = Dataset.from_list([row, {**KINDS[0], "kind": 0}])
    with two_lengths():
        trainer = made(method, dataset, tokenizer=MergingTokenizer())
    assert kinds_of(trainer.train_dataset) == [0]


def test_each_evaluation_set_of_several_is_looked_at(method: str) -> None:
    evaluation = made(method, rows(0), DatasetDict({"whole": rows(0, 1), "other": rows(1, 2)})).eval_dataset
    assert type(evaluation) is DatasetDict
    assert {name: kinds_of(dataset) for name, dataset in evaluation.items()} == {"whole": [0, 1], "other": [1]}


def test_a_plain_dictionary_of_evaluation_sets_stays_one(method: str) -> None:
    # TRL refuses one when it prepares the datasets.
    trainer, whole = made(method, rows(0)), made(method, rows(0, 1)).train_dataset
    trainer.eval_dataset = {"whole": whole}
    drop_rows_without_a_response(Call(lambda: None, trainer))
    assert type(trainer.eval_dataset) is dict
    assert trainer.eval_dataset["whole"] is whole


def test_datasets_with_responses_stay_as_they_are(method: str, caplog: pytest.LogCaptureFixture) -> None:
    trainer = made(method, rows(0, 1), rows(1))
    assert kinds_of(trainer.train_dataset) == [0, 1]
    assert kinds_of(trainer.eval_dataset) == [1]
    assert made(method, rows(0)).eval_dataset is None
    assert [record for record in caplog.records if record.name == "trl_hotfix"] == []
    assert acts(method, trainer, "__init__") == 0
    train, evaluation = trainer.train_dataset, trainer.eval_dataset
    drop_rows_without_a_response(Call(lambda: None, trainer))
    assert (trainer.train_dataset is train, trainer.eval_dataset is evaluation) == (True, True)


def test_rows_of_a_users_own_tokenize_row_stay(method: str) -> None:
    class Own(tiny.classes(method)[0]):  # type: ignore[misc]
        def tokenize_row(self, feature: Any, model: Any = None) -> Any:
            return {"chosen_labels": [-100]}

    assert kinds_of(made(method, rows(0, 2), trainer_class=Own).train_dataset) == [0, 2]
