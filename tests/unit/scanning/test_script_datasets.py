"""The columns and the roles of a dataset that a script makes are those that the text shows, or unknown."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.scanning.scripts import read

HEAD = "from datasets import Dataset, load_dataset\nfrom trl import GRPOConfig, GRPOTrainer, SFTTrainer\n"
USER = "[{'role': 'system', 'content': 's'}, {'role': 'user', 'content': x}]"
OPEN = "[{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': '<think>'}]"


def facts(tmp_path: Path, text: str) -> dict[str, Any]:
    script = tmp_path / "train.py"
    script.write_text(HEAD + textwrap.dedent(text) + "GRPOTrainer('m', reward_funcs=len, train_dataset=data).train()\n")
    (call,) = read(script).calls
    return {name: fact.value for name, fact in call.facts().items()}


@pytest.mark.parametrize(
    "text",
    [
        f"data = Dataset.from_dict({{'prompt': [{USER}] * 10}})\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}] * 10 + [{USER}] * n}})\n",
        f"data = Dataset.from_dict({{'prompt': [{USER} for x in range(4)]}})\n",
        f"data = Dataset.from_list([{{'prompt': {USER}}} for x in y])\n",
        f"data = load_dataset('d', split='train').map(lambda x: {{'prompt': {USER}}})\n",
        f"def f(x):\n    prompt = {USER}\n    return {{'prompt': prompt}}\ndata = load_dataset('d').map(f)['train']\n",
        f"def f(x):\n    return {{'prompt': {USER}}}\ndata, other = load_dataset('d', split=['a', 'b'])\n"
        "data = data.map(f)\ndata = data.filter(len).remove_columns(['messages'])\nprint(data[0])\n",
        f"def f(x):\n    return {{'prompt': {USER}}}\ndef g(x):\n    image = x['image']\n    x['image'] = image\n"
        "    return x\ndata = load_dataset('d').map(f).map(g)\n",
        "data = Dataset.from_dict({'prompt': ['a', 'b']})\n",
    ],
)
def test_prompts_that_end_with_no_answer_are_known(tmp_path: Path, text: str) -> None:
    assert facts(tmp_path, text)["prefilled"] is False


def test_a_prompt_that_ends_with_an_answer_is_known(tmp_path: Path) -> None:
    assert facts(tmp_path, f"data = Dataset.from_dict({{'prompt': [{OPEN}, {USER}]}})\n")["prefilled"] is True


@pytest.mark.parametrize(
    "text",
    [
        "data = load_dataset('d')\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}, y]}})\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}]}})\ndata = data.map(f)\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}]}})\ndata = prepare(data)\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}]}})\ndata.set_transform(f)\n",
        f"data = load_dataset('d').map(lambda x: {{'prompt': {USER}}}, batched=True)\n",
        f"data = load_dataset('d').map(lambda x: {{'prompt': {USER}, **x}})\n",
        f"def f(x):\n    prompt = {USER}\n    prompt.append(x)\n    return {{'prompt': prompt}}\n"
        "data = load_dataset('d').map(f)\n",
        f"def f(x):\n    if x:\n        return {{}}\n    return {{'prompt': {USER}}}\n"
        "data = load_dataset('d').map(f)\n",
        f"def f(x):\n    return {{'prompt': {USER}}}\ndef g(x):\n    p = x['prompt']\n    p.append(1)\n    return x\n"
        "data = load_dataset('d').map(f).map(g)\n",
        f"data = Dataset.from_dict({{'prompt': [{USER}]}}).rename_column('prompt', 'other')\n",
    ],
)
def test_prompts_that_the_text_does_not_show_are_unknown(tmp_path: Path, text: str) -> None:
    assert "prefilled" not in facts(tmp_path, text)


def test_all_columns_are_known_of_what_removes_the_others(tmp_path: Path) -> None:
    text = (
        f"data = load_dataset('d')\ndata = data.map(lambda x: {{'messages': {USER}}}, remove_columns=data.features)\n"
    )
    found = facts(tmp_path, text)
    assert (found["columns"], found["images"], found["sharegpt_roles"]) == (["messages"], False, False)


def test_other_columns_may_be_there_if_those_of_another_dataset_are_removed(tmp_path: Path) -> None:
    text = f"data = load_dataset('d').map(lambda x: {{'messages': {USER}}}, remove_columns=other.column_names)\n"
    assert "images" not in facts(tmp_path, text)
