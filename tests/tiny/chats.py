"""Prompts and completions of messages, their tokens by the template of ``chat_tokenizer``, and their labels."""

from __future__ import annotations

from typing import Any

from .data import tokenizer
from .sft_steps import Row

HEADERS = {"user": "w58", "assistant": "w59"}
"""The word that opens a turn in the template of the tiny tokenizer."""


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


def conversations() -> list[dict[str, Any]]:
    """Return prompts of one turn or three, and completions of one to four words, some with a second exchange."""
    rows = []
    for row in range(8):
        words = [f"w{(7 * row + 3 * place) % 56}" for place in range(8)]
        earlier = [message("user", words[5]), message("assistant", f"{words[6]} {words[7]}")] if row % 3 == 1 else []
        later = [message("user", words[6]), message("assistant", words[5])] if row % 4 == 2 else []
        prompt = [*earlier, message("user", " ".join(words[: 1 + row % 2]))]
        rows.append({"prompt": prompt, "completion": [message("assistant", " ".join(words[2 : 3 + row % 4])), *later]})
    return rows


def rendered(messages: list[dict[str, str]]) -> list[int]:
    """Return the token ids of messages: for each a header, its words and an end of sequence."""
    text = " ".join(f"{HEADERS[part['role']]} {part['content']} <eos>" for part in messages)
    token_ids: list[int] = tokenizer()(text)["input_ids"]
    return token_ids


def prompt_lengths() -> dict[tuple[int, ...], int]:
    """Return how many tokens the prompt has with the header of the answer, by the tokens of the conversation."""
    return {
        tuple(rendered(row["prompt"] + row["completion"])): len(rendered(row["prompt"])) + 1 for row in conversations()
    }


def trained_from(offset: int) -> Any:
    """Return what makes the labels of a row begin ``offset`` tokens behind its header."""
    lengths = prompt_lengths()

    def labelled(row: Row) -> Row:
        ids, _ = row
        begin = lengths[tuple(ids)] + offset
        return ids, [-100] * begin + ids[begin:]

    return labelled


def lengths_of_prompts(prepared: Any) -> dict[tuple[int, ...], int]:
    """Return the length of each prompt of a prepared dataset, by the tokens of the conversation."""
    return {tuple(row["input_ids"]): row["completion_mask"].index(1) for row in prepared}


def cases_without_masks() -> dict[str, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """Return rows, and fields of the config, of pairs of texts, messages, tokens, and of a loss of all tokens."""
    rows = conversations()
    masks = {ids: [0] * length + [1] * (len(ids) - length) for ids, length in prompt_lengths().items()}
    return {
        "texts": ([{"prompt": "w1 w2", "completion": f" w{row} w3"} for row in range(8)], {}),
        "messages": ([{"messages": row["prompt"] + row["completion"]} for row in rows], {}),
        "tokens": ([{"input_ids": list(ids), "completion_mask": mask} for ids, mask in masks.items()], {}),
        "all tokens": (rows, {"completion_only_loss": False}),
    }
