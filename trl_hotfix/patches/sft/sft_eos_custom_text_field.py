"""SFT adds no end-of-sequence token to a text field that is not called ``text``.

Since 0.17.0 (pull request 3328) ``_prepare_dataset`` appends the end-of-sequence token before it tokenises, but only in
the column ``text``. 0.16 appended the token after tokenising, whatever the name of the column.

TRL 1.15.0 appends it in the column that ``dataset_text_field`` names. The wrapper does this before the call, for the
texts that do not end with it. With a ``formatting_func`` TRL should not tokenise the column at all: that is another
patch, ``sft-formatting-func-ignored``.
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
def end_the_texts(call: Call) -> Any:
    """Append the end-of-sequence token in the column that is tokenised, and call the method with this dataset."""
    from trl.trainer import sft_trainer as module

    dataset, processing_class, settings, formatting_func = (
        call[name] for name in ("dataset", "processing_class", "args", "formatting_func")
    )
    field = settings.dataset_text_field
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    eos_token = getattr(tokenizer, "eos_token", None)
    if field == "text" or eos_token is None or formatting_func is not None or not _is_text(module, dataset, field):
        return call()
    sample = next(iter(dataset))[field].removesuffix(eos_token) or "a"
    if tokenizer(sample)["input_ids"][-1:] == [tokenizer.eos_token_id]:
        return call()

    def with_eos(example: Mapping[str, Any]) -> dict[str, str]:
        text: str = example[field]
        return {field: text if text.endswith(eos_token) else text + eos_token}

    doing = f"Adding EOS to {field} of {call['dataset_name']} dataset"
    return call.with_(dataset=prepared_first(module, dataset, with_eos, settings, doing))()


def _is_text(module: ModuleType, dataset: Any, field: str) -> bool:
    """Return whether TRL will tokenise ``field``: a text in an example that is not of another kind."""
    from datasets import Dataset, IterableDataset

    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    first = next(iter(dataset))
    if "input_ids" in first or "prompt" in first or not isinstance(first.get(field), str):
        return False
    return not module.is_conversational(module.maybe_convert_to_chatml(first))


def texts_end(module: ModuleType) -> Outcome:
    """Count the ends of a text in ``content``: one, and none with the bug. TRL ends what is in ``text``."""
    prepare = getattr(module.SFTTrainer, "_prepare_dataset", None)
    if prepare is None or "args" not in inspect.signature(prepare).parameters:
        return absent("this release adds no end-of-sequence token")
    rows = [{"content": "ab", "text": "c"}]
    (row,) = quick_sft_prepared(module, rows, CharacterTokenizer(), dataset_text_field="content")
    ends = row["input_ids"].count(1)
    if not ends and not row["text"].endswith("\1"):
        return absent("this release adds no end-of-sequence token")
    return judge(ends, right=1, wrong=0)
