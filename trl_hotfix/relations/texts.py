"""Rows whose text is rendered, cut or marked before, as forms of ``forms.FORMS``.

Each has a sibling with the same tokens. A form that has a template of its own gives it to the tokenizer.
"""

from __future__ import annotations

from typing import Any

from .conversations import _labelled as labelled
from .forms import _conversation as conversation
from .forms import _conversation_without_prompt as without_prompt
from .forms import _rendered as rendered
from .forms import _split as split
from .forms import _turn as turn
from .forms import is_form

HEADER = "w59"
"""A word that some templates write in front of each answer."""

_ANSWERS = "{% if message['role'] == 'assistant' %}{{ eos_token }}{% else %} {% endif %}{% endfor %}"
_MESSAGES = "{% for message in messages %}{{ message['content'] }}" + _ANSWERS
_GENERATION = f"{{% if add_generation_prompt %}}{HEADER} {{% endif %}}"

Row = dict[str, Any]


@is_form("text of a template")
def _of_template(row: Row, tokenizer: Any) -> Row:
    """Return the row as a template renders it: it begins as the template writes it."""
    begins = tokenizer.bos_token if tokenizer.chat_template.startswith(tokenizer.bos_token) else ""
    if "text" in row:
        prompt, completion = split(row["text"])
        messages = turn("user", prompt) + turn("assistant", completion)
        return {"text": rendered({"messages": messages}, tokenizer)}
    return {**row, "prompt": f"{begins}{row['prompt']}"}


@is_form("another field")
def _in_another_field(row: Row, tokenizer: Any) -> Row:
    return {"story": row["text"]}


@is_form("prompt and completion beside a text")
def _beside_text(row: Row, tokenizer: Any) -> Row:
    prompt, completion = split(row["text"])
    return {"prompt": prompt, "completion": completion, "text": row["text"]}


@is_form("tokens with labels")
def _with_labels(row: Row, tokenizer: Any) -> Row:
    """Return the tokens of a text, with labels for all but the first two."""
    ids = [*tokenizer(row["text"])["input_ids"], tokenizer.eos_token_id]
    return {"input_ids": ids, "labels": [-100, -100, *ids[2:]]}


@is_form("conversation by from and value")
def _by_from_and_value(row: Row, tokenizer: Any) -> Row:
    prompt, completion = split(row["text"])
    return {"conversations": [{"from": "human", "value": prompt}, {"from": "gpt", "value": completion.strip()}]}


@is_form("conversation with a header")
def _with_header(row: Row, tokenizer: Any) -> Row:
    """Return a prompt and a completion. The template writes a header in front of the completion."""
    header = "{% if message['role'] == 'assistant' %}" + HEADER + " {% endif %}{{ message['content'] }}"
    tokenizer.chat_template = _MESSAGES.replace("{{ message['content'] }}", header) + _GENERATION
    return {"prompt": turn("user", row["prompt"]), "completion": turn("assistant", row["completion"])}


@is_form("prompt with a header")
def _prompt_with_header(row: Row, tokenizer: Any) -> Row:
    return {"prompt": f"{row['prompt']} {HEADER}", "completion": row["completion"]}


@is_form("prompt that ends inside a word")
def _inside_word(row: Row, tokenizer: Any) -> Row:
    """Return the row with the first letter of the completion in the prompt."""
    answer = row["completion"]
    return {**row, "prompt": row["prompt"] + answer[:2], "completion": answer[2:]}


@is_form("pair without prompt")
def _without_prompt(row: Row, tokenizer: Any) -> Row:
    """Return two answers that have no word and no letter in common at their beginning."""
    return {"chosen": row["chosen"].strip(), "rejected": f"x{row['rejected']}"}


@is_form("pair without prompt that ends with a space")
def _with_space(row: Row, tokenizer: Any) -> Row:
    return {"chosen": f"{row['chosen'].strip()} ", "rejected": f"x{row['rejected']}"}


@is_form("conversation whose prompt begins the answer")
def _begun(row: Row, tokenizer: Any) -> Row:
    """Return a pair whose chosen answer begins as the template begins one, and whose rejected answer does not."""
    tokenizer.chat_template = _MESSAGES + _GENERATION
    chosen = f"{HEADER} {row['chosen'].strip()}"
    return {"prompt": turn("user", row["prompt"]), "chosen": turn("assistant", chosen), "rejected": _rejected(row)}


def _rejected(row: Row) -> list[dict[str, str]]:
    return turn("assistant", row["rejected"])


@is_form("pair whose chosen answer has a header")
def _chosen_with_header(row: Row, tokenizer: Any) -> Row:
    return {**row, "chosen": f" {HEADER}{row['chosen']}"}


@is_form("conversation that begins the answer")
def _prefilled(row: Row, tokenizer: Any) -> Row:
    prompt, begun = split(row["prompt"])
    return {"prompt": turn("user", prompt) + turn("assistant", begun)}


@is_form("last two words")
def _last_words(row: Row, tokenizer: Any) -> Row:
    return {"prompt": " ".join(row["prompt"].split()[-2:])}


_MARKED = "{% if message['role'] == 'assistant' %}ANSWER{% else %}{{ message['content'] }} {% endif %}{% endfor %}"
_CONTENT = "{{ message['content'] }}"
_END = "{{ eos_token }}"


@is_form("conversation with its answers marked")
def _answers_marked(row: Row, tokenizer: Any) -> Row:
    """Return messages whose template marks the answers, and writes the end of sequence behind the mark."""
    marked = f"{{% generation %}}{_CONTENT}{{% endgeneration %}}{_END}"
    tokenizer.chat_template = "{% for message in messages %}" + _MARKED.replace("ANSWER", marked)
    return {"messages": row["messages"]}


@is_form("conversation cut before the answer")
def _cut_before_answer(row: Row, tokenizer: Any) -> Row:
    """Return the same messages as a prompt and a completion."""
    tokenizer.chat_template = "{% for message in messages %}" + _MARKED.replace("ANSWER", _CONTENT + _END)
    return {"prompt": turn("user", row["prompt"]), "completion": turn("assistant", row["completion"])}


def _begins(tokenizer: Any) -> None:
    """Give the tokenizer a template that writes the beginning of a sequence, even if the tokenizer does too."""
    tokenizer.chat_template = tokenizer.bos_token + _MESSAGES


@is_form("conversation with a beginning")
def _with_beginning(row: Row, tokenizer: Any) -> Row:
    _begins(tokenizer)
    return conversation(row, tokenizer)


@is_form("conversation without prompt with a beginning")
def _whole_with_beginning(row: Row, tokenizer: Any) -> Row:
    _begins(tokenizer)
    return without_prompt(row, tokenizer)


@is_form("conversation with label and a beginning")
def _labelled_with_beginning(row: Row, tokenizer: Any) -> Row:
    _begins(tokenizer)
    return labelled(row, tokenizer)


@is_form("conversation with a line behind the end")
def _with_line(row: Row, tokenizer: Any) -> Row:
    """Return turns that end with the end of sequence and a line break, which is a token."""
    tokenizer.add_tokens(["\n"])
    tokenizer.chat_template = _MESSAGES.replace("{{ eos_token }}", "{{ eos_token }}{{ '\n' }}")
    return conversation(row, tokenizer)
