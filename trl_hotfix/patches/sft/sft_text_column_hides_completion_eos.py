"""SFT ends the text of a row and not its completion, if the row has both.

``add_eos`` in ``_prepare_dataset`` appends the end-of-sequence token to the column ``text``, and to ``completion`` only
if that column is not there (an ``elif``, of pull request 3328). TRL tokenises the prompt and the completion.
From 1.15.0 on ``dataset_text_field`` names the column.

The wrapper ends the completions before the call. It leaves the text where it is, since a collator of the user's may
read it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, prepared_first, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, quick_sft_prepared


@wrapper
def end_beside_text(call: Call) -> Any:
    """End the completions of rows that have a column ``text`` (0.17.0 to 1.14.2)."""
    return _end_beside("text", call)


@wrapper
def end_beside_text_field(call: Call) -> Any:
    """End the completions of rows that have the column ``dataset_text_field`` (1.15.0 and later)."""
    return _end_beside(call["args"].dataset_text_field, call)


def _end_beside(field: str, call: Call) -> Any:
    """End the completions of rows that have the column ``field``, and call the method with this dataset."""
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func = (
        call[name] for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    eos_token = tokenizer.eos_token
    if eos_token is None or formatting_func is not None or not _is_unended_pair(dataset, field, tokenizer):
        return call()

    def with_eos(example: Mapping[str, Any]) -> dict[str, str]:
        completion: str = example["completion"]
        return {"completion": completion if completion.endswith(eos_token) else completion + eos_token}

    doing = f"Adding EOS to completions of {call['dataset_name']} dataset"
    return call.with_(dataset=prepared_first(module, dataset, with_eos, settings, doing))()


def _is_unended_pair(dataset: Any, field: str, tokenizer: Any) -> bool:
    """Return whether the first row has ``field`` beside a prompt and a completion that the tokenizer does not end."""
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    if "input_ids" in first or field not in first or field == "completion":
        return False
    pair = first.get("prompt"), first.get("completion")
    if not all(isinstance(text, str) for text in pair):
        return False
    ids = tokenizer("".join(pair).removesuffix(tokenizer.eos_token))["input_ids"]
    return bool(ids[-1:] != [tokenizer.eos_token_id])


def completions_end(module: ModuleType) -> Outcome:
    """Count the ends of a completion beside a text: one, and none with the bug. TRL ends that of the other row."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release adds no end-of-sequence token")
    rows = [{"prompt": "ab", "completion": "cd", "text": "e"}, {"prompt": "ab", "completion": "cd"}]
    beside_text, alone = quick_sft_prepared(module, rows, CharacterTokenizer())
    if "completion" not in alone:
        return absent("this release makes one text of prompt and completion, and overwrites the column")
    if alone["input_ids"][-1] != 1:
        return absent("this release adds no end-of-sequence token to the completion")
    return judge(beside_text["input_ids"].count(1), right=1, wrong=0)
