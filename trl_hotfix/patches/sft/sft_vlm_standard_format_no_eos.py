"""SFT on images adds no end-of-sequence token to plain texts and completions.

``SFTTrainer._prepare_dataset`` adds the token to the texts and completions of a dataset without images. It never sees a
dataset with images: ``DataCollatorForVisionLanguageModeling`` tokenises each batch, and adds no token. Nor does the
processor, since the collator calls it with ``add_special_tokens=False``.

The wrapper adds the token to the texts of a batch as ``_prepare_dataset`` does. It hands on copies of these examples,
since a dataset that is a list would keep a change.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterProcessor


@wrapper
def end_the_texts(call: Call) -> Any:
    """Append the end-of-sequence token to the texts or completions that lack it, and call the collator with these."""
    examples, collator = call["examples"], call.trainer
    eos_token = collator.processor.tokenizer.eos_token
    if eos_token is None or "messages" in examples[0]:
        return call()
    field = collator.dataset_text_field if collator.dataset_text_field in examples[0] else "completion"

    def is_open(example: dict[str, Any]) -> bool:
        text = example.get(field)
        return isinstance(text, str) and not text.endswith(eos_token)

    if not any(map(is_open, examples)):
        return call()
    ended = [{**row, field: row[field] + eos_token} if is_open(row) else row for row in examples]
    return call.with_(examples=ended)()


def texts_end(module: ModuleType) -> Outcome:
    """Count the labels of three completions that are the end-of-sequence token. One completion has it already."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    collator = module.DataCollatorForVisionLanguageModeling(CharacterProcessor(), completion_only_loss=True)
    row: dict[str, Any] = {"images": [], "prompt": "x"}
    rows = [{**row, "completion": completion} for completion in ("ab", "c", "d\1")]
    return judge(int((collator(rows)["labels"] == 1).sum()), right=3, wrong=1)
