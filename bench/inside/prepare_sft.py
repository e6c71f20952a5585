"""Run inside one release: wrap the patches of ``SFTTrainer._prepare_dataset`` around it in every order.

    python -m bench.inside.prepare_sft OUT.json

In each order the method prepares datasets that need one or more of the patches, as a ``Dataset`` and as an
``IterableDataset``. The answer has the distinct results.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import completion_start_prefix_mismatch
import wrapt
from datasets import Dataset
from trl.trainer import sft_trainer

from trl_hotfix.call import Call, takes_call
from trl_hotfix.patches.data.completion_start_prefix_mismatch import start_the_completion_of_sft
from trl_hotfix.patches.sft.sft_eos_custom_text_field import end_the_texts
from trl_hotfix.patches.sft.sft_formatting_func_ignored import tokenise_what_the_function_returns
from trl_hotfix.testing import default_arguments, single_process, stream, stub_trainer

import tiny

WRAPPERS = (tokenise_what_the_function_returns, end_the_texts, start_the_completion_of_sft)


def of_messages(example: Any) -> str:
    return f"w2 {example['messages'][0]['content']}"


def of_content(example: Any) -> str:
    return f"w2 {example['content']}"


def of_prompt(example: Any) -> str:
    return f"w2 {example['prompt']}"


MESSAGES = [{"messages": [{"role": "user", "content": "w1"}]}]
CONTENT = [{"content": "w1 w4"}]
PAIR = [{"prompt": "w1", "completion": " w4 w5"}]
# The second text continues the first, as a completion continues its prompt.
TEXTS = [{"text": "w1"}, {"text": "w1 w2"}]
CASES: tuple[tuple[str, list[dict[str, Any]], Any, str, bool], ...] = (
    ("messages, formatted", MESSAGES, of_messages, "text", False),
    ("another field, formatted", CONTENT, of_content, "content", False),
    ("another field", CONTENT, None, "content", False),
    ("a pair, formatted", PAIR, of_prompt, "content", False),
    ("a pair, whose tokenizer ends texts", PAIR, None, "text", True),
    ("texts, whose tokenizer ends them", TEXTS, None, "text", True),
)


def prepared(rows: Any, function: Any, field: str, *, ends: bool) -> list[Any]:
    tokenizer = completion_start_prefix_mismatch.ending_words() if ends else tiny.chat_tokenizer()
    args = default_arguments(
        sft_trainer.SFTConfig, max_length=None, dataset_text_field=field, completion_only_loss=False
    )
    attributes: dict[str, Any] = {
        "chat_template": None,
        "completion_only_loss": ends,
        "_is_vlm": False,
        "_tokenizer": tokenizer,
    }
    trainer = stub_trainer(sft_trainer.SFTTrainer, args, **attributes)
    with single_process(sft_trainer):
        dataset = trainer._prepare_dataset(rows, tokenizer, args, False, function, "train")
        return [[row["input_ids"], counted(row)] for row in dataset]


def counted(row: Any) -> int:
    """Return the number of tokens of the row that are trained."""
    if "completion_mask" in row:
        return sum(row["completion_mask"])
    return sum(label != -100 for label in row.get("labels", row["input_ids"]))


def by_four_arguments(wrapper: Any) -> Any:
    """Return the wrapper as wrapt calls it."""
    if not takes_call(wrapper):
        return wrapper
    return lambda wrapped, instance, args, kwargs: wrapper(Call(wrapped, instance, args, kwargs))


def main(out: str) -> None:
    unpatched = sft_trainer.SFTTrainer._prepare_dataset
    results: list[Any] = []
    for order in itertools.permutations(WRAPPERS):
        sft_trainer.SFTTrainer._prepare_dataset = unpatched
        for wrapper in order:
            wrapt.wrap_function_wrapper(sft_trainer, "SFTTrainer._prepare_dataset", by_four_arguments(wrapper))
        for make in (Dataset.from_list, stream):
            result = {name: prepared(make(rows), *arguments, ends=ends) for name, rows, *arguments, ends in CASES}
            if result not in results:
                results.append(result)
    Path(out).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
