"""The same rows in the forms that a dataset may have."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

_END = "{{% if message['role'] == 'assistant' %}}{{{{ eos_token }}}}{behind}{{% else %}} {{% endif %}}{{% endfor %}}"
TEMPLATE = "{begins}{{% for message in messages %}}{{{{ message['content'] }}}}" + _END
"""A template with which a conversation is the text of its turns, with an end as TRL writes it behind a text."""

CALLS = (
    "{begins}{{% for tool in tools or () %}}{{{{ tool | tojson }}}} {{% endfor %}}"
    "{{% for message in messages %}}{{{{ message['content'] }}}} "
    "{{% if message['tool_calls'] %}}{{{{ message['tool_calls'] | tojson }}}}{{% endif %}}" + _END
)
"""One that shows the tools, and which of them are called."""

BEHIND = " w7"
"""Words that some templates write behind the end of a turn."""


def in_form(rows: Any, form: str, tokenizer: Any) -> Any:
    """Return rows in another form, by a name of ``FORMS``. For conversations the tokenizer gets their template."""
    if form.startswith("conversation") or "template" in form:
        # What a template writes in front is then not written by the tokenizer.
        begins = tokenizer.bos_token if tokenizer("w0")["input_ids"][0] == tokenizer.bos_token_id else ""
        template = CALLS if "calls" in form or "tools" in form else TEMPLATE
        tokenizer.chat_template = template.format(begins=begins, behind=BEHIND if "behind" in form else "")
    from datasets import Dataset

    # Rows that have other fields, as calls of other tools have, get all fields in a table.
    return Dataset.from_list([FORMS[form](row, tokenizer) for row in rows])


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


def _calls(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a conversation whose answer is a call. Every second calls another tool, which takes another argument.

    Keys are in order, since datasets up to 2.21 sorts them.
    """
    prompt, completion = _split(row["text"])
    name = "fg"[len(completion) % 2]
    call = {"function": {"arguments": {f"of {name}": completion.split()[0]}, "name": name}, "type": "function"}
    answer = {"role": "assistant", "content": completion.strip(), "tool_calls": [call]}
    return {"messages": [*_turn("user", prompt), answer]}


def _tools(row: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return a conversation with the tool that it may call."""
    messages = _calls(row, tokenizer)["messages"]
    name = messages[-1].pop("tool_calls")[0]["function"]["name"]
    argument = {f"of {name}": {"description": "w5", "type": "string"}}
    parameters = {"properties": argument, "required": list(argument), "type": "object"}
    function = {"description": "w3 w4", "name": name, "parameters": parameters}
    return {"messages": messages, "tools": [{"function": function, "type": "function"}]}


def _with_json(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "tools": json.dumps(row["tools"])}


def _rendered(row: dict[str, Any], tokenizer: Any) -> str:
    text: str = tokenizer.apply_chat_template(row["messages"], tokenize=False)
    return text


FORMS: dict[str, Callable[[dict[str, Any], Any], dict[str, Any]]] = {
    "prompt and completion": _completion,
    "tokens": _tokens,
    "conversation": _conversation,
    "conversation in two": _conversation_in_two,
    "conversation without prompt": _conversation_without_prompt,
    "conversation with calls": _calls,
    "text of calls in a template": lambda row, tokenizer: {"text": _rendered(_calls(row, tokenizer), tokenizer)},
    "conversation and tools": _tools,
    "conversation and tools as JSON": lambda row, tokenizer: _with_json(_tools(row, tokenizer)),
    "conversation with words behind the end": _conversation,
    "tokens of a template with words behind the end": lambda row, tokenizer: {
        "input_ids": tokenizer(_rendered(_conversation(row, tokenizer), tokenizer))["input_ids"]
    },
    "extra column": lambda row, tokenizer: {**row, "note": f"of {row.get('prompt', 'no prompt')}"},
}

Form = Callable[[dict[str, Any], Any], dict[str, Any]]


def is_form(name: str) -> Callable[[Form], Form]:
    """Return a decorator that makes a function the form of this name. The key of an answer has only its own form."""

    def known(function: Form) -> Form:
        FORMS[name] = function
        return function

    return known
