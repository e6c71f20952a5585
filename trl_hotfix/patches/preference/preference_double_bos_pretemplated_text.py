"""DPO, KTO, TPO and RewardTrainer put a second beginning-of-sequence token before a text that begins with one.

A text that has been through a chat template begins with ``<|begin_of_text|>`` or ``<bos>``. ``_prepare_dataset``
tokenizes it, with its completion, by ``processing_class(text=...)``, which adds the token as to any other text. DPO up
to 0.28 and KTO up to 1.2 pass ``add_special_tokens=False``, and KTO adds a beginning to a text that lacks one.
RewardTrainer up to 0.23 has the bug in ``_tokenize``, which ``reward-conversation-double-bos`` repairs.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, adds_beginning, beginning_once, judge, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    absent_if_reexported,
    default_arguments,
    quick_rows,
    single_process,
    stub_trainer,
    trainer_and_config,
)


@wrapper
def begin_once(call: Call) -> Any:
    """Give TRL a tokenizer that begins texts once, if the first text would begin twice."""
    tokenizer = call["processing_class"]
    # A view of another patch's would take what is asked here for the first row.
    if not _begins_twice(next(iter(call["dataset"]), {}), inspect.unwrap(tokenizer)):
        return call()
    call.act()
    return call.with_(processing_class=beginning_once(tokenizer))()


def _begins_twice(row: Any, tokenizer: Any) -> bool:
    """Return whether the text of a row has a beginning, and the tokenizer adds another."""
    beginning = getattr(tokenizer, "bos_token_id", None)
    parts = [row.get("prompt", ""), row.get("chosen", row.get("completion", ""))]
    if beginning is None or not all(isinstance(part, str) for part in parts):
        return False
    own_ids = tokenizer("".join(parts), add_special_tokens=False)["input_ids"]
    return bool(own_ids[:1] == [beginning]) and adds_beginning(tokenizer)


class _Beginning(CharacterTokenizer):
    """A tokenizer that puts the character 2 before a text."""

    bos_token_id: Any = 2

    def __call__(self, text: str, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        return super().__call__("\2" * add_special_tokens + text)


def texts_begin_once(module: ModuleType) -> Outcome:
    """Count the beginnings of two prompts. One of them has its own, and the tokenizer puts one before each."""
    trainer_class, config_class = trainer_and_config(module, "DPO", "KTO", "TPO", "Reward")
    prepare = trainer_class._prepare_dataset
    if reexported := absent_if_reexported(module, prepare):
        return reexported
    if hasattr(trainer_class, "tokenize_row"):
        return absent("in this release the prompt is tokenized without special tokens")
    tokenizer = _Beginning()
    answers: dict[str, Any] = {"chosen": "c", "rejected": "d", "reference": "e"}
    if hasattr(module, "KTOTrainer"):
        answers = {"completion": "c", "label": True}
    rows = quick_rows([{"prompt": prompt, **answers} for prompt in ("\2ab", "a")])
    known = {"_tokenizer": tokenizer, "_is_vlm": False, "calculate_KL": False}
    trainer = stub_trainer(trainer_class, default_arguments(config_class), **known)
    with single_process(module):
        prepared = list(trainer._prepare_dataset(rows, tokenizer, trainer.args, "train"))
    names = ("prompt_ids", "chosen_ids", "chosen_input_ids")
    ids = [next(row[name] for name in names if name in row) for row in prepared]
    return judge(sum(row.count(2) for row in ids), right=2, wrong=3)
