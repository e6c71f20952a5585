"""What the rows of a dataset tell, and what they leave open. The file may be anything."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from trl_hotfix.catalogue.conditions import Kind
from trl_hotfix.catalogue.facts import OF_DATASETS
from trl_hotfix.errors import ScriptError
from trl_hotfix.matching.dataset_facts import Reader, dataset_fact
from trl_hotfix.patching.given_datasets import described
from trl_hotfix.scanning.dataset_files import dataset_facts

QUESTION = {"role": "user", "content": "a"}
ANSWER = {"role": "assistant", "content": "b"}
CHAT = [QUESTION, ANSWER]
SHAREGPT = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "train.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def known(path: Path) -> dict[str, Any]:
    return {name: fact.value for name, fact in dataset_facts(path).items() if fact.kind is Kind.LITERAL}


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"messages": CHAT}], {"conversational": True, "no_prefix": False, "images": False, "text_column": False}),
        ([{"text": "a"}, {"text": "b"}], {"conversational": False, "no_prefix": False, "text_column": True}),
        ([{"text": "a"}], {"tokens_in_one_piece": False}),
        ([{"input_ids": [1], "labels": [1]}], {"tokens_in_one_piece": None, "columns": ["input_ids", "labels"]}),
        (
            [{"prompt": "a", "completion": "b"}],
            {"conversational": False, "prompt_completion": True, "prefilled": False},
        ),
        ([{"prompt": [QUESTION]}, {"prompt": CHAT}], {"conversational": True, "prefilled": True}),
        ([{"prompt": CHAT}, {"prompt": [QUESTION]}], {"prefilled": True}),
        ([{"prompt": [QUESTION], "image": None}], {"prefilled": False, "images": True}),
        ([{"chosen": CHAT, "rejected": CHAT}], {"pairs": True, "prefilled": None, "no_prefix": None}),
        ([{"conversations": SHAREGPT}], {"sharegpt_roles": None, "conversational": None}),
        ([{"messages": CHAT}, {"messages": CHAT, "tools": []}], {"columns": ["messages", "tools"]}),
        # A column of several kinds, or of none, is not taken for either.
        ([{"prompt": "a"}, {"prompt": [QUESTION]}], {"conversational": None, "prefilled": None}),
        ([{"prompt": []}], {"conversational": None, "prefilled": None, "sharegpt_roles": None}),
        ([{"prompt": None}, {"prompt": CHAT}], {"conversational": True, "prefilled": True}),
        ([{"prompt": [QUESTION], "completion": "b"}], {"conversational": None}),
        ([{"text": "<s>a"}], {"any_text_has_bos": None, "plain_text_has_bos": None}),
    ],
)
def test_the_rows_tell_facts(tmp_path: Path, rows: list[Any], expected: dict[str, Any]) -> None:
    facts = known(written(tmp_path, *rows))
    assert {name: facts.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    "rows",
    [
        [{"messages": CHAT, "text": "x"}, {"messages": CHAT[:1], "text": "y"}],
        [{"prompt": [QUESTION], "completion": [ANSWER]}],
        [{"prompt": CHAT}],
        [{"conversations": SHAREGPT}],
        [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    ],
)
def test_what_the_file_tells_is_what_the_dataset_tells(tmp_path: Path, rows: list[Any]) -> None:
    dataset = described(Dataset.from_list(rows))
    assert dataset is not None
    reader = Reader("text", lambda: None, "train_dataset")
    told = known(written(tmp_path, *rows))
    for name in OF_DATASETS:
        fact = dataset_fact(name, dataset, reader)
        if fact.kind is Kind.LITERAL:
            assert told[name] == fact.value, name


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"a": 1}\n[1]\n', "line 2: expected an object"),
        ("a,b\n1,2\n", "line 1 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON"),
        (b"\xff\xfe{", "is not UTF-8"),
        (b"PAR1\x00\x01", "line 1 is not JSON"),
    ],
)
def test_another_file_is_one_clear_error(tmp_path: Path, content: str | bytes, expected: str) -> None:
    path = tmp_path / "train.jsonl"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(ScriptError, match=re.escape(expected)) as caught:
        dataset_facts(path)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_one_clear_error(tmp_path: Path) -> None:
    for path, expected in ((tmp_path / "gone", "is not there"), (tmp_path, "is no file")):
        with pytest.raises(ScriptError, match=expected):
            dataset_facts(path)
    large = tmp_path / "large.jsonl"
    with large.open("wb") as file:
        file.truncate((1 << 28) + 1)
    with pytest.raises(ScriptError, match="more than 256 MiB"):
        dataset_facts(large)


def test_no_library_is_imported(tmp_path: Path) -> None:
    path = written(tmp_path, {"messages": CHAT})
    code = (
        "import sys, pathlib; from trl_hotfix.scanning.dataset_files import dataset_facts; "
        f"dataset_facts(pathlib.Path({str(path)!r})); "
        "print({'datasets', 'torch', 'transformers', 'pyarrow'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


ROWS = [{"prompt": "a", "completion": "b", "text": "c"}, {"prompt": "1", "completion": "d", "text": "e"}]


@pytest.mark.parametrize("form", ["json", "csv", "parquet"])
def test_other_forms_tell_the_same(tmp_path: Path, form: str) -> None:
    path, dataset = tmp_path / f"train.{form}", Dataset.from_list(ROWS)
    if form == "json":
        path.write_text(json.dumps(ROWS))
    else:
        getattr(dataset, f"to_{form}")(str(path))
    found, expected = known(path), known(written(tmp_path, *ROWS))
    # A cell that looks like a number may be one, and then the column is none of texts.
    assert found.items() <= expected.items() if form == "csv" else found == expected
    assert found["prompt_completion"]
    assert found["text_column"]


def test_messages_in_parquet_are_messages(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    Dataset.from_list([{"prompt": [QUESTION], "completion": [ANSWER]}]).to_parquet(str(path))
    assert known(path)["conversational"] is True


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("x.json", "[1]", "row 1: expected an object"),
        ("x.json", "[{", "x.json is not JSON"),
        ("x.csv", "a,b\n1\n", "line 2: expected 2 values"),
        ("x.csv", 'a\n"b', "is not CSV"),
        ("x.parquet", "PAR1", "is not Parquet"),
    ],
)
def test_another_file_of_a_form_is_one_clear_error(tmp_path: Path, name: str, content: str, expected: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ScriptError, match=re.escape(expected)) as caught:
        dataset_facts(tmp_path / name)
    assert "\n" not in str(caught.value)
