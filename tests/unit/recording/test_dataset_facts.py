"""The facts of the dataset that a trainer was given. What its columns and its first row leave open is unknown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.catalogue.facts import OF_DATASETS
from trl_hotfix.patching import given
from trl_hotfix.recording.trainer_facts import TrainerFacts

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
HUMAN, GPT, TOOL = ({"from": role, "value": "a"} for role in ("human", "gpt", "tool"))


class Trainer(SimpleNamespace):
    def __init__(self, train_dataset: Any = None) -> None:
        super().__init__(args=SimpleNamespace(dataset_text_field="text"))
        self.processing_class = SimpleNamespace(chat_template="{{ messages }}")


def made(*rows: dict[str, Any]) -> Trainer:
    """Return a trainer whose dataset has these rows."""
    trainer = Trainer()
    given.note(trainer, Trainer.__init__, (), {"train_dataset": Dataset.from_list(list(rows))})
    return trainer


def value(trainer: Any, name: str) -> Any:
    """Return a fact, or None if it is unknown."""
    found = TrainerFacts(trainer).find(name)
    assert found.kind in (Kind.LITERAL, Kind.UNKNOWN)
    assert found.reason
    return found.value


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [USER]}, True),
        ({"messages": [USER], "text": "x"}, True),
        ({"prompt": [USER], "completion": [ASSISTANT]}, True),
        ({"prompt": [USER], "chosen": [ASSISTANT], "rejected": [ASSISTANT]}, True),
        ({"prompt": "x", "completion": "y", "text": "z"}, False),
        ({"text": "x"}, False),
        ({"prompt": "x", "completion": [ASSISTANT]}, None),
        ({"messages": [HUMAN]}, None),
        ({"input_ids": [1]}, None),
        ({"content": "x"}, None),
    ],
)
def test_a_dataset_is_conversational_by_its_columns(row: dict[str, Any], expected: bool | None) -> None:
    assert value(made(row), "conversational") is expected


def test_the_columns_are_told() -> None:
    facts = {name: value(made({"prompt": "x", "completion": "y", "image": 1}), name) for name in OF_DATASETS}
    assert facts == {
        "columns": ["prompt", "completion", "image"],
        "tokens_in_one_piece": False,
        "conversational": False,
        "images": True,
        "pairs": False,
        "prompt_completion": True,
        "text_column": False,
        "named_text_column": False,
        "sharegpt_roles": False,
        "any_text_has_bos": None,
        "plain_text_has_bos": None,
        "no_prefix": None,
        "prefilled": False,
    }
    trainer = made({"chosen": "x", "rejected": "y", "body": "z"})
    trainer.args.dataset_text_field = "body"
    assert [value(trainer, name) for name in ("pairs", "named_text_column", "text_column")] == [True, True, False]


@pytest.mark.parametrize(
    ("row", "template", "expected"),
    [
        ({"conversations": [HUMAN, GPT]}, "{{ messages }}", True),
        ({"messages": [HUMAN]}, "{{ messages }}", True),
        # Another row may have them.
        ({"conversations": [TOOL]}, "{{ messages }}", None),
        ({"conversations": [HUMAN]}, "{% if role == 'human' %}", None),
        ({"conversations": [HUMAN]}, None, None),
        ({"conversations": [USER]}, "{{ messages }}", False),
        ({"text": "x"}, "{{ messages }}", False),
        ({"messages": [1]}, "{{ messages }}", None),
    ],
)
def test_the_roles_of_sharegpt_are_those_of_the_first_row(row: Any, template: Any, expected: bool | None) -> None:
    trainer = made(row)
    trainer.processing_class.chat_template = template
    assert value(trainer, "sharegpt_roles") is expected


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        (["x"], False),
        ([[USER, ASSISTANT], [USER]], True),
        ([[USER], [USER, ASSISTANT]], None),
    ],
)
def test_a_prompt_that_is_prefilled_is_seen_in_the_first_row(prompts: list[Any], expected: bool | None) -> None:
    assert value(made(*({"prompt": prompt} for prompt in prompts)), "prefilled") is expected


@pytest.mark.parametrize(
    ("row", "no_prefix", "plain_text_has_bos"),
    [
        ({"messages": [USER]}, False, False),
        ({"text": "x"}, False, None),
        ({"prompt": [USER], "completion": [ASSISTANT]}, None, False),
        ({"chosen": "x", "rejected": "y"}, None, None),
    ],
)
def test_what_texts_begin_with_is_told_by_what_the_dataset_lacks(
    row: Any, no_prefix: bool | None, plain_text_has_bos: bool | None
) -> None:
    trainer = made(row)
    assert value(trainer, "no_prefix") is no_prefix
    assert value(trainer, "plain_text_has_bos") is plain_text_has_bos
    assert value(trainer, "any_text_has_bos") is None


@pytest.mark.parametrize("name", OF_DATASETS)
def test_a_dataset_that_was_not_seen_is_unknown(name: str) -> None:
    assert TrainerFacts(Trainer()).find(name).reason == "the columns of the training dataset are not known"
