"""Tokenizers of 60 words, and datasets of preferences and of labelled completions."""

from __future__ import annotations

from typing import Any


def tokenizer() -> Any:
    """Return a tokenizer of 60 words, without a beginning-of-sequence token: releases differ in where they put one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
    vocabulary = {word: index for index, word in enumerate(words)}
    word_level = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=word_level,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        model_input_names=["input_ids", "attention_mask"],
    )


def chat_tokenizer(template: str | None = None) -> Any:
    """Return ``tokenizer()`` with a chat template: a word for the role, the content, and an end of sequence."""
    chat = tokenizer()
    chat.chat_template = template or (
        "{% for message in messages %}"
        "{{ 'w58 ' if message['role'] == 'user' else 'w59 ' }}{{ message['content'] }} <eos> "
        "{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
    )
    return chat


def left_padding_tokenizer() -> Any:
    """Return ``tokenizer()`` with padding on the left, as trainers that generate need it."""
    left_padding = tokenizer()
    left_padding.padding_side = "left"
    return left_padding


def preferences() -> Any:
    """Return eight prompts, each with a chosen completion of three words and a rejected one of two."""
    from datasets import Dataset

    rows = [
        {
            "prompt": f"w{index} w{index + 1} w{index + 2}",
            "chosen": f" w{index + 3} w{index + 5} w{index + 7}",
            "rejected": f" w{index + 4} w{index + 6}",
        }
        for index in range(8)
    ]
    return Dataset.from_list(rows)


def preferences_of_several_lengths() -> Any:
    """Return eight prompts of two to four words; chosen completions have two or three words, rejected three to five."""
    from datasets import Dataset

    rows = [
        {
            "prompt": " ".join(f"w{index + place}" for place in range(2 + index % 3)),
            "chosen": "".join(f" w{(7 * index + 3 * place) % 60}" for place in range(2 + index % 2)),
            "rejected": "".join(f" w{(5 * index + 11 * place) % 60}" for place in range(3 + index % 3)),
        }
        for index in range(8)
    ]
    return Dataset.from_list(rows)


def labelled(pairs: Any = None) -> Any:
    """Return the completions of ``pairs``, by default ``preferences()``, good and bad in turn, in the format of KTO."""
    from datasets import Dataset

    rows = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in (preferences() if pairs is None else pairs)
        for side in ("chosen", "rejected")
    ]
    return Dataset.from_list(rows)
