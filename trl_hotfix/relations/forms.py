"""The same rows in the forms that a dataset may have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

TEMPLATE = (
    "{{ BOS }}{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %} {% endif %}{% endfor %}"
)
"""A template with which a conversation is the text of its turns, with an end as TRL writes it behind a text."""


def in_form(rows: Any, form: str, tokenizer: Any) -> Any:
    """Return rows in another form, by a name of ``FORMS``. For conversations the tokenizer gets their template."""
    if form.startswith("conversation"):
        # What a template writes in front is then not written by the tokenizer.
        begins = tokenizer.bos_token if tokenizer("w0")["input_ids"][0] == tokenizer.bos_token_id else ""
        tokenizer.chat_template = TEMPLATE.replace("{{ BOS }}", begins)
    return rows.map(lambda row: FORMS[form](row, tokenizer), remove_columns=rows.column_names)


def with_marks(tokenizer: Any, marks: str) -> Any:
    """Return a tokenizer that pads with its end (``"pad is end"``), or that writes marks around a text itself."""
    from tokenizers.processors import TemplateProcessing

    begin, end = tokenizer.bos_token, tokenizer.eos_token
    if marks == "pad is end":
        tokenizer.pad_token = end
        return tokenizer
    single = {"begin": f"{begin} $A", "end": f"$A {end}"}[marks]
    pair = single.replace("$A", "$A $B")
    special = [(begin, tokenizer.bos_token_id), (end, tokenizer.eos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=special)
    return tokenizer


def _turn(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text.strip()}]


def _split(text: str) -> tuple[str, str]:
    """Return the first word of a text, and the rest."""
    first, _, rest = text.partition(" ")
    return first, f" {rest}"


def _completion(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    prompt, completion = _split(row["text"])
    return {"prompt": prompt, "completion": completion}


def _tokens(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    ids = tokenizer(row["text"])["input_ids"]
    return {"input_ids": ids if ids[-1] == tokenizer.eos_token_id else [*ids, tokenizer.eos_token_id]}


def _conversation(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return the turns of a text, of two answers to a prompt, or of a prompt."""
    if "text" in row:
        prompt, completion = _split(row["text"])
        return {"messages": _turn("user", prompt) + _turn("assistant", completion)}
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    return {name: _turn(role, row[name]) for name, role in roles.items() if name in row}


def _conversation_in_two(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    prompt, completion = _split(row["text"])
    return {"prompt": _turn("user", prompt), "completion": _turn("assistant", completion)}


def _conversation_without_prompt(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    prompt = _turn("user", row["prompt"])
    return {name: prompt + _turn("assistant", row[name]) for name in ("chosen", "rejected")}


FORMS: dict[str, Callable[[dict[str, Any], Any], dict[str, Any]]] = {
    "prompt and completion": _completion,
    "tokens": _tokens,
    "conversation": _conversation,
    "conversation in two": _conversation_in_two,
    "conversation without prompt": _conversation_without_prompt,
    "extra column": lambda row, tokenizer: {**row, "note": f"of {row.get('prompt', 'no prompt')}"},
}
