"""What a training dataset is, as it was given. No row is read through it, and a stream is not begun."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, Features, IterableDataset, Sequence, Value

from trl_hotfix.patching import given
from trl_hotfix.patching.given_datasets import TEXT, described

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def untouchable(*arguments: Any) -> Any:
    raise AssertionError("a row was read")


def test_columns_types_and_roles_are_described() -> None:
    rows = [{"messages": CHAT, "text": "x", "label": True}, {"messages": CHAT[:1], "text": "y", "label": False}]
    found = described(Dataset.from_list(rows))
    assert found is not None
    assert found.columns == ("messages", "text", "label")
    assert {name: sorted(kind) for name, kind in found.types.items()} == {
        "messages": ["content", "role"],
        "text": sorted(TEXT),
    }
    assert found.roles == {"messages": ("user", "assistant")}


def test_the_first_row_is_that_of_the_dataset_and_not_of_its_table() -> None:
    dataset = Dataset.from_list([{"conversations": SHAREGPT}, {"conversations": SHAREGPT[:1]}])
    for shown, roles in ((dataset, ("human", "gpt")), (dataset.select([1, 0]), ("human",))):
        found = described(shown)
        assert found is not None
        assert found.roles == {"conversations": roles}
    empty = described(dataset.select([]))
    assert empty is not None
    assert empty.roles == {}


def test_a_stream_is_not_begun() -> None:
    features = Features({"prompt": [{"role": Value("string"), "content": Value("string")}]})
    found = described(IterableDataset.from_generator(untouchable, features=features))
    assert found is not None
    assert (found.columns, found.roles) == (("prompt",), {})
    assert found.types["prompt"] != TEXT
    # Without features, nothing tells the columns but a row.
    assert described(IterableDataset.from_generator(untouchable)) is None


def test_a_dataset_whose_rows_are_made_by_a_transform_is_not_known() -> None:
    dataset = Dataset.from_list([{"messages": CHAT, "text": "x"}])
    assert described(dataset.with_transform(untouchable)) is None
    assert described(dataset.with_format(columns=["text"])) is None
    assert described(dataset.with_format("torch")) is not None


def test_a_dict_of_lists_is_no_list_of_messages() -> None:
    features = Features({"messages": Sequence({"role": Value("string"), "content": Value("string")})})
    found = described(Dataset.from_dict({"messages": [{"role": ["user"], "content": ["a"]}]}, features=features))
    assert found is not None
    assert "messages" not in found.types


class Raising(Dataset):  # type: ignore[misc]
    @property
    def features(self) -> Any:
        raise RuntimeError


@pytest.mark.parametrize(
    "dataset", [None, [{"text": "x"}], {"text": ["x"]}, SimpleNamespace(features={}), Raising.from_dict({"a": [1]})]
)
def test_anything_else_is_not_known(dataset: Any) -> None:
    assert described(dataset) is None


def test_the_dataset_of_a_constructor_is_noted() -> None:
    class Trainer:
        def __init__(self, model: Any = None, train_dataset: Any = None) -> None: ...

    class Passing(Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    dataset = Dataset.from_list([{"text": "x"}])
    for cls in (Trainer, Passing):
        trainer = cls()
        assert given.dataset_of(trainer) is None
        given.note(trainer, cls.__init__, (), {"train_dataset": dataset})
        found = given.dataset_of(trainer)
        assert found is not None
        assert found.columns == ("text",)
