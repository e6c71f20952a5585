"""SFT on images never adds the end-of-sequence token to plain texts and completions.

``SFTTrainer._prepare_dataset`` adds the token to the texts and completions of a dataset without images. A dataset with
images is never prepared: ``DataCollatorForVisionLanguageModeling`` tokenises each batch, and adds no token. Nor does
the processor, since the collator calls it with ``add_special_tokens=False``.

The wrapper adds the token to the texts of a batch as ``_prepare_dataset`` does, and hands copies of these examples on:
a dataset that is a list would keep a change.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, replaced_argument
from ...model import Outcome, Verdict
from ...testing import CharacterProcessor


def end_the_texts(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Append the end-of-sequence token to the texts or completions that lack it, and call the collator with these."""
    examples = argument(wrapped, args, kwargs, "examples")
    eos_token = instance.processor.tokenizer.eos_token
    if eos_token is None or "messages" in examples[0]:
        return wrapped(*args, **kwargs)
    field = instance.dataset_text_field if instance.dataset_text_field in examples[0] else "completion"

    def is_open(example: dict[str, Any]) -> bool:
        text = example.get(field)
        return isinstance(text, str) and not text.endswith(eos_token)

    if not any(map(is_open, examples)):
        return wrapped(*args, **kwargs)
    ended = [{**row, field: row[field] + eos_token} if is_open(row) else row for row in examples]
    args, kwargs = replaced_argument(wrapped, args, kwargs, "examples", ended)
    return wrapped(*args, **kwargs)


def texts_end(module: ModuleType) -> Outcome:
    """Check the ids and labels of completions, and of texts in a column of another name."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    collator = _collator(module, completion_only_loss=True)
    prompts, completions = ("x", "yz", "v"), ("ab", "c", "d\1")
    pairs = [{"images": [], "prompt": text, "completion": end} for text, end in zip(prompts, completions, strict=True)]
    labels = _labelled(collator(pairs))
    if labels == list(completions):
        return Outcome(Verdict.REPRODUCED, {"labels": labels})
    ended = ["ab\1", "c\1", "d\1"]
    mistakes = [] if labels == ended else [f"the labels are {labels}"]
    # The prompts come before them, and a second call, as in another epoch, is given the same rows.
    collator.completion_only_loss = False
    expected = [f"{text}{end}" for text, end in zip(prompts, ended, strict=True)]
    with _without_gradients():
        again = _labelled(collator(pairs))
    if again != expected or [row["completion"] for row in pairs] != list(completions):
        mistakes.append(f"in a second call the labels are {again}, and the rows {pairs}")
    mistakes += _mistakes_elsewhere(module)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"labels": labels})


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong with a column of texts, with texts that are cut, and with rows that are to stay."""
    mistakes = []
    # In a later step, and by keyword.
    collator = _collator(module, dataset_text_field="content", max_length=4)
    collator.state = SimpleNamespace(global_step=1)
    rows: list[dict[str, Any]] = [
        {"images": [], "content": text, "completion": "z"} for text in ("a\1", "bc", "abcde", "")
    ]
    labels = _labelled(collator.torch_call(examples=rows))
    if labels != ["a\1", "bc\1", "abcd", "\1"]:
        mistakes.append(f"the labels of texts are {labels}")
    # The first row tells the format of a batch.
    mixed = [{"content": "a"}, {"completion": "b"}]
    if end_the_texts(_given, collator, (mixed,), {}) != [{"content": "a\1"}, {"completion": "b"}]:
        mistakes.append("completions beside texts are others")
    without_end = _collator(module)
    without_end.processor.tokenizer.eos_token = None
    message = {"role": "user", "content": "ab"}
    pair = {"prompt": "x", "completion": "y"}
    left_alone: dict[str, tuple[Any, list[dict[str, Any]]]] = {
        "what ends": (collator, [{**pair, "completion": "y\1"}, {**pair, "completion": "\1"}]),
        "texts that end": (collator, [{**pair, "content": "y\1"}]),
        "a conversation": (collator, [{"prompt": [message], "completion": [message]}]),
        "a conversation with a text": (collator, [{"messages": [message], "content": "y"}, {"content": "y"}]),
        "prompts": (collator, [{"prompt": "x"}]),
        "no end": (without_end, [pair]),
    }
    for name, (unchanged, examples) in left_alone.items():
        if end_the_texts(_given, unchanged, (examples,), {}) is not examples:
            mistakes.append(f"{name}: the rows are others")
    return mistakes


def _given(examples: Any) -> Any:
    """Return what the collator would be given."""
    return examples


def _without_gradients() -> Any:
    import torch

    return torch.no_grad()


def _collator(module: ModuleType, **settings: Any) -> Any:
    return module.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)


def _labelled(batch: Any) -> list[str]:
    """Return the characters of each row that are labels."""
    return ["".join(chr(label) for label in row if label != -100) for row in batch["labels"].tolist()]
