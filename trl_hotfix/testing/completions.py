"""SFT prepares prompts and completions of messages for ``CharacterTokenizer``."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

from .chats import messages
from .processes import single_process, stream
from .trainers import default_arguments, stub_trainer


def prepared_completions(
    module: ModuleType, pairs: Sequence[tuple[Sequence[str], Sequence[str]]], tokenizer: Any
) -> list[tuple[str, list[bool]]]:
    """Return the text of each pair's tokens, and which of these are trained, after ``_prepare_dataset``.

    The loss is over the completions, and nothing is truncated or packed. A release without such a loss has no marks.
    Two trainers prepare two datasets each, so that each pair is there twice. From 0.15.0 on.
    """
    settings = {"completion_only_loss": True, "max_length": None, "max_seq_length": None, "shuffle_dataset": False}
    known = {"chat_template": None, "completion_only_loss": True, "_is_vlm": False, "_tokenizer": tokenizer}
    found = []
    for _ in range(2):
        trainer = stub_trainer(module.SFTTrainer, default_arguments(module.SFTConfig, **settings), **known)
        for part in (pairs[:2], pairs[2:]):
            rows = stream([{"prompt": messages(*prompt), "completion": messages(*answer)} for prompt, answer in part])
            with single_process(module):
                prepared = list(trainer._prepare_dataset(rows, tokenizer, trainer.args, False, None, "train"))
            found += [(tokenizer.decode(row["input_ids"]), _trained(row)) for row in prepared]
    whole = ["".join(f"{turn}\1" for turn in (*prompt, *answer)) for prompt, answer in pairs] * 2
    if (texts := [text for text, _ in found]) != whole:
        raise AssertionError(f"the tokens spell {texts}, expected {whole}")
    return found


def _trained(row: dict[str, Any]) -> list[bool]:
    """Return the marks of a row, which are masks up to 1.6 and labels from 1.7.0 on."""
    if "completion_mask" in row:
        return [bool(mark) for mark in row["completion_mask"]]
    return [label != -100 for label in row.get("labels", ())]
