"""Rewards that a trainer gets in another way: none for some answers, or from a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import forms, materials
from .changes import Arguments, is_change, rows, words_of
from .setting import Setting


@is_change("no reward for some answers")
def _none(arguments: Arguments, folder: Path) -> None:
    arguments["reward_funcs"] = _judging(lambda known: [None] * known.count(None))


@is_change("the mean of the others for some answers")
def _mean(arguments: Arguments, folder: Path) -> None:
    arguments["reward_funcs"] = _judging(_means)


def _judging(instead: Any) -> Any:
    """Return a reward that does not judge the first answer of each group, with something instead of it."""

    def judge(completions: list[Any], **kwargs: Any) -> list[Any]:
        known: list[Any] = list(materials.reward(completions))
        for first in range(0, len(known), materials.GROUP):
            group = [None, *known[first + 1 : first + materials.GROUP]]
            known[first] = instead(group)[0]
        return known

    return judge


def _means(group: list[Any]) -> list[float]:
    judged = [value for value in group if value is not None]
    return [sum(judged) / len(judged)]


@is_change("a reward model")
def _model(arguments: Arguments, folder: Path) -> None:
    _reward_model(arguments, folder).eval()


@is_change("a reward model in train mode")
def _model_in_train_mode(arguments: Arguments, folder: Path) -> None:
    _reward_model(arguments, folder).train()


def _reward_model(arguments: Arguments, folder: Path) -> Any:
    """Give a reward model with dropout, and its tokenizer, which writes what the policy's writes."""
    model = materials.model(folder, Setting(), seed=2, labels=1)
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    arguments["reward_funcs"] = model
    words = materials.tokenizer(Setting(), "right")
    policy = words_of(arguments)
    if policy("w0")["input_ids"][0] == policy.bos_token_id:
        words = forms.with_marks(words, "begin")
    begins = policy.bos_token if policy("w0")["input_ids"][0] == policy.bos_token_id else ""
    # A text has no end behind the answer either.
    words.chat_template = begins + "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    arguments["reward_processing_classes"] = words
    if isinstance(arguments["train_dataset"][0]["prompt"], str):
        # An answer follows the prompt as it is.
        rows(arguments, lambda row: {**row, "prompt": f"{row['prompt']} "})
    return model
