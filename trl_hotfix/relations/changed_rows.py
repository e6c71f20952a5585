"""Rows that a trainer gets in another way: formatted, unpaired, cut to nothing, or with tools beside an image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import images, materials
from .changes import Arguments, field, is_change, rows, words_of
from .forms import _split as split
from .forms import _turn as turn

MORE = " w9"


@is_change("a word more")
def _with_word(arguments: Arguments, folder: Path) -> None:
    rows(arguments, lambda row: {"text": row["text"] + MORE})


@is_change("a function that adds a word")
def _formatted(arguments: Arguments, folder: Path) -> None:
    """Give messages, and a function that makes a text of them."""

    def formatted(row: dict[str, Any]) -> str:
        return " ".join(turn["content"] for turn in row["messages"]) + MORE

    arguments["formatting_func"] = formatted


@is_change("rows in pairs")
def _paired(arguments: Arguments, folder: Path) -> None:
    """Give a row for the two answers to each prompt, which the trainer takes apart."""
    from datasets import Dataset

    apart = list(arguments["train_dataset"])
    both = zip(apart[::2], apart[1::2], strict=True)
    pairs = [
        {"prompt": one["prompt"], "chosen": one["completion"], "rejected": other["completion"]} for one, other in both
    ]
    arguments["train_dataset"] = Dataset.from_list(pairs)


@is_change("rows without room for an answer")
def _with_long_prompts(arguments: Arguments, folder: Path) -> None:
    """Put a row before each fourth one whose prompt alone is longer than all that is kept."""
    from datasets import Dataset

    kept = list(arguments["train_dataset"])
    long = materials.words(0, arguments["args"].max_length + 1)
    every = [
        row for number, row in enumerate(kept) for row in ([{**row, "prompt": long}, row] if number % 4 == 0 else [row])
    ]
    arguments["train_dataset"] = Dataset.from_list(every)


@is_change("answers that the model would give")
def _of_model(arguments: Arguments, folder: Path) -> None:
    """Give pairs of the model's most probable words: all of them are chosen, and the first few rejected."""
    words, model = words_of(arguments), arguments["model"]

    def answered(row: dict[str, Any]) -> dict[str, Any]:
        prompt = words(row["prompt"], return_tensors="pt")["input_ids"]
        found = model.generate(prompt, do_sample=False, min_new_tokens=6, max_new_tokens=6, pad_token_id=0)
        chosen = [f" {words.convert_ids_to_tokens(each)}" for each in found[0, prompt.shape[1] :].tolist()]
        return {**row, "chosen": "".join(chosen), "rejected": "".join(chosen[:4])}

    rows(arguments, answered)


@is_change("a collator that masks the prompt", needs="DataCollatorForCompletionOnlyLM")
def _masked(arguments: Arguments, folder: Path) -> None:
    _collate(arguments, padding_free=False)


@is_change("a collator that masks the prompt and does not pad", needs="DataCollatorForCompletionOnlyLM")
def _flattened(arguments: Arguments, folder: Path) -> None:
    _collate(arguments, padding_free=True)


def _collate(arguments: Arguments, *, padding_free: bool) -> None:
    from trl import DataCollatorForCompletionOnlyLM

    rows(arguments, lambda row: {"text": " w59 ".join(split(row["text"]))})
    response = [materials.FIRST_WORD + 59]
    arguments["data_collator"] = DataCollatorForCompletionOnlyLM(
        response, tokenizer=words_of(arguments), padding_free=padding_free
    )


@is_change("loss by token")
def _by_token(arguments: Arguments, folder: Path) -> None:
    """Have a model that sees and takes no number of items, as many do."""
    arguments["model"].accepts_loss_kwargs = False


SEEN = (
    "{% for tool in tools or () %}{{ tool['function']['name'] }} {% endfor %}{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos }}{% else %} {% endif %}{% endfor %}"
)
"""A template that shows the tools, and the end of an answer."""


@is_change("images in conversations")
def _seen(arguments: Arguments, folder: Path) -> None:
    _show(arguments)
    rows(arguments, _conversation)


@is_change("images and tools in conversations")
def _with_tools(arguments: Arguments, folder: Path) -> None:
    _show(arguments)
    rows(arguments, lambda row: {**_conversation(row), "tools": [_TOOL]})


@is_change("images in texts")
def _in_texts(arguments: Arguments, folder: Path) -> None:
    """Give a prompt and a completion as texts, with the image in front as TRL puts it into a conversation."""
    _show(arguments)

    def texts(row: dict[str, Any]) -> dict[str, Any]:
        question, answer = (turn["content"] for turn in row["messages"])
        return {"prompt": f"{images.TOKEN} {question} ", "completion": answer, "images": row["images"]}

    rows(arguments, texts)
    field(arguments, "completion_only_loss", False)


@is_change("images that are the whole prompt")
def _whole_prompt(arguments: Arguments, folder: Path) -> None:
    """Give messages whose prompt is an image without a word."""
    _show(arguments)
    rows(arguments, lambda row: {"messages": _image_and_answer(row), "images": row["images"]})


@is_change("images that are the whole prompt, cut before the answer")
def _whole_prompt_apart(arguments: Arguments, folder: Path) -> None:
    _show(arguments)

    def apart(row: dict[str, Any]) -> dict[str, Any]:
        prompt, answer = _image_and_answer(row)
        return {"prompt": [prompt], "completion": [answer], "images": row["images"]}

    rows(arguments, apart)


def _image_and_answer(row: dict[str, Any]) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": [{"type": "text", "text": row["messages"][1]["content"]}]}
    return [{"role": "user", "content": [{"type": "image", "text": None}]}, answer]


@is_change("images in conversations in two")
def _in_two(arguments: Arguments, folder: Path) -> None:
    _show(arguments)
    rows(
        arguments,
        lambda row: {"prompt": row["messages"][:1], "completion": row["messages"][1:], "images": row["images"]},
    )
    field(arguments, "completion_only_loss", False)


_PARAMETERS = {
    "type": "object",
    "properties": {"place": {"type": "string", "description": "w5"}},
    "required": ["place"],
}
_TOOL = {"type": "function", "function": {"name": "w7", "description": "w3", "parameters": _PARAMETERS}}


def _show(arguments: Arguments) -> None:
    processor: Any = arguments.get("processing_class", arguments.get("tokenizer"))
    processor.chat_template = SEEN.replace("{{ eos }}", words_of(arguments).eos_token)


def _conversation(row: dict[str, Any]) -> dict[str, Any]:
    if "messages" in row:
        return row
    question = row["prompt"].replace(f"{images.TOKEN} ", "")
    answers = {name: turn("assistant", row[name]) for name in ("chosen", "rejected")}
    return {"prompt": turn("user", question), **answers, "images": row["images"]}


@is_change("another run before, which cut the rows shorter")
def _after_shorter(arguments: Arguments, folder: Path) -> None:
    _on_disk(arguments, folder, before=5)


@is_change("rows on disk")
def _rows_on_disk(arguments: Arguments, folder: Path) -> None:
    _on_disk(arguments, folder, before=0)


def _on_disk(arguments: Arguments, folder: Path, before: int) -> None:
    """Take the rows from a file, where datasets finds what was computed of them before."""
    import copy
    import tempfile

    from datasets import load_dataset

    # Each has files of its own.
    path = Path(tempfile.mkdtemp(dir=folder), "rows.json")
    arguments["train_dataset"].to_json(str(path))
    arguments["train_dataset"] = load_dataset("json", data_files=str(path), split="train", cache_dir=str(path.parent))
    if before:
        import trl

        trainer_class = getattr(trl, type(arguments["args"]).__name__.replace("Config", "Trainer"))
        other = {**arguments, "args": copy.copy(arguments["args"])}
        other["args"].max_length = before
        first = trainer_class(**other)
        first.get_train_dataloader()
