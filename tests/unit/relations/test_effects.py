from __future__ import annotations

from typing import Any

from trl_hotfix.relations.effects import Given


class Values:
    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


def given() -> dict[str, Any]:
    tokenizer = Values(
        **dict.fromkeys(("truncation_side", "pad_token", "eos_token", "bos_token", "chat_template")),
        padding_side="left",
    )
    model = Values(config=Values(use_cache=True), generation_config=Values(eos_token_id=[1]))
    return {"args": Values(seed=0), "model": model, "processing_class": tokenizer, "train_dataset": [{"text": "a"}]}


def test_what_stays_is_no_change() -> None:
    arguments = given()
    before = Given(arguments)
    # transformers writes the one end of sequence as a list.
    arguments["model"].generation_config.eos_token_id = 1
    assert before.changes() == {}


def test_each_thing_that_was_given_is_watched() -> None:
    arguments = given()
    before = Given(arguments)
    arguments["args"].seed = 1
    arguments["model"].config.use_cache = False
    arguments["model"].generation_config.eos_token_id = [1, 2]
    arguments["processing_class"].padding_side = "right"
    arguments["train_dataset"][0]["text"] = "b"
    assert before.changes() == {
        "argument seed": ("0", "1"),
        "config use_cache": ("True", "False"),
        "generation config eos_token_id": ("1", "[1, 2]"),
        "tokenizer padding_side": ("'left'", "'right'"),
        "train dataset": ("[{'text': 'a'}]", "[{'text': 'b'}]"),
    }
