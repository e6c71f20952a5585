"""SFT on images drops the tools and the ``chat_template_kwargs`` of its conversations.

Without images ``SFTTrainer._prepare_dataset`` renders a conversation with both columns. With images there are three
obstacles. ``_set_signature_columns_if_needed`` does not name the two columns, so they are removed before a batch is
collated. ``_collate_language_modeling`` calls ``processor.apply_chat_template`` without them. And
``_collate_prompt_completion`` calls the function ``apply_chat_template`` without the tools, and before 0.24.0 without
``chat_template_kwargs`` too.

A call of the processor renders all its conversations with the same tools. The view of the processor that the second
wrapper sets renders one by one if they differ. From 1.15.0 on that call also tokenises; then the texts and images are
given to the processor as the collator gives it those of plain texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, argument, replaced_argument, shadowed
from ...model import Outcome, Verdict
from ...testing import CharacterProcessor, default_arguments, stub_trainer

COLUMNS = ("tools", "chat_template_kwargs")

_OF_THE_TEMPLATE = frozenset(
    {"chat_template", "tokenize", "return_dict", "return_assistant_tokens_mask", "processor_kwargs"}
)
"""The arguments of ``apply_chat_template`` in the collator that are not the processor's."""


def keep_the_columns(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Name the two columns among those that a dataset of images keeps."""
    is_new = instance._signature_columns is None
    wrapped(*args, **kwargs)
    if is_new and "images" in instance._signature_columns:
        # A stream may not know its columns.
        if set(COLUMNS) & set(getattr(instance.train_dataset, "column_names", None) or COLUMNS):
            act()
        instance._signature_columns += COLUMNS


def render_with_tools(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the processor render each conversation of a batch with what its row has for the chat template."""
    examples = argument(wrapped, args, kwargs, "examples")
    options = [_options(row) for row in examples]
    if "messages" not in examples[0] or not any(options):
        return wrapped(*args, **kwargs)
    with shadowed(instance, "processor", _rendering_with(instance.processor, options)):
        return wrapped(*args, **kwargs)


def pass_the_tools(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Render a prompt and its completion with what the row has for the chat template."""
    example = argument(wrapped, args, kwargs, "example")
    options = _options(example)
    if not (options or COLUMNS[1] in example) or argument(wrapped, args, kwargs, "tools") is not None:
        return wrapped(*args, **kwargs)
    args, kwargs = replaced_argument(wrapped, args, kwargs, "tools", options.pop("tools", None))
    # From 0.24.0 on TRL takes the others from the row itself. It cannot take them twice, nor None.
    row = {name: value for name, value in example.items() if name != COLUMNS[1]}
    args, kwargs = replaced_argument(wrapped, args, kwargs, "example", row)
    return wrapped(*args, **kwargs, **options)


def _options(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row has for the chat template. Tools may be a text, as JSON."""
    tools = example.get("tools")
    tools = json.loads(tools or "null") if isinstance(tools, str) else tools
    return {**({"tools": tools} if tools else {}), **(example.get("chat_template_kwargs") or {})}


def _rendering_with(processor: Any, options: list[dict[str, Any]]) -> Any:
    """Return a view of ``processor`` that renders each conversation of a batch with its own ``options``."""
    import wrapt

    class ProcessorView(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def apply_chat_template(self, conversations: Sequence[Any], **kwargs: Any) -> Any:
            render = self.__wrapped__.apply_chat_template
            first = options[0]
            if options == [first] * len(options):
                return render(conversations, **{**kwargs, **first})
            rows = list(zip(conversations, options, strict=True))
            if kwargs.get("tokenize"):
                return _tokenised(self.__wrapped__, rows, kwargs)
            return [render(conversation, **row) for conversation, row in rows]

    return ProcessorView(processor)


def _tokenised(processor: Any, rows: Sequence[tuple[Any, dict[str, Any]]], kwargs: Mapping[str, Any]) -> Any:
    """Return the batch of conversations with different options. ``kwargs`` are those of the collator's own call."""
    import torch

    render = processor.apply_chat_template
    texts = [render(conversation, **{"chat_template": kwargs["chat_template"], **row}) for conversation, row in rows]
    images = [
        [part["image"] for message in conversation for part in message.get("content") or () if part["type"] == "image"]
        for conversation, _ in rows
    ]
    # Before transformers 5.4 the arguments of the processor stand among those of the template.
    settings = {name: value for name, value in kwargs.items() if name not in _OF_THE_TEMPLATE}
    settings = {**settings, **kwargs.get("processor_kwargs", {})}
    batch = processor(images=images if any(images) else None, text=texts, **settings)
    if kwargs["return_assistant_tokens_mask"]:
        batch["assistant_masks"] = torch.zeros_like(batch["input_ids"])
        for number, (conversation, row) in enumerate(rows):
            (mask,) = render([conversation], **{**kwargs, **row})["assistant_masks"]
            batch["assistant_masks"][number, : len(mask)] = torch.as_tensor(mask)
    return batch


def tools_are_rendered(module: ModuleType) -> Outcome:
    """Check the columns that are kept, and the tokens of conversations with and without tools."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    kept = _columns(module, "_is_vision_dataset", "_is_vlm")
    tokens = {kind: _texts(_collator(module)(_rows(kind))["input_ids"]) for kind in ("messages", "pairs")}
    plain = {kind: _expected(kind, [""] * 3) for kind in tokens}
    if not set(COLUMNS) & set(kept) and tokens == plain:
        return Outcome(Verdict.REPRODUCED, {"columns": kept, "tokens": tokens})
    mistakes = [f"the columns are {kept}"] if sorted(set(kept)) != sorted(kept) or not set(COLUMNS) <= set(kept) else []
    # The names of the tools are before the messages.
    right = {kind: _expected(kind, ["T", "", "VWX"]) for kind in tokens}
    mistakes += [f"the tokens of {kind} are {tokens[kind]}" for kind in tokens if tokens[kind] != right[kind]]
    mistakes += _mistakes_in_batches(module) + _mistakes_elsewhere(module)
    if mistakes:
        raise AssertionError("; ".join(mistakes))
    return Outcome(Verdict.FIXED, {"columns": kept, "tokens": tokens})


TOOLS: tuple[dict[str, Any], ...] = (
    {"tools": [{"name": "T"}]},
    {"tools": ""},
    {"tools": '[{"name": "V"}, {"name": "W"}, {"name": "X"}]'},
)
"""Tools, none, and tools as JSON, which is longer."""

OPTIONS = ({**TOOLS[0], "chat_template_kwargs": {"style": "!"}}, {**TOOLS[1], "chat_template_kwargs": None}, TOOLS[2])
"""The same, and a style for the chat template."""


def _rows(kind: str, options: Sequence[dict[str, Any]] = TOOLS) -> list[dict[str, Any]]:
    """Return rows with images, without and with two, of ``messages`` or of ``pairs`` of prompt and completion."""
    rows = []
    for images, text, choice in zip(([7], [], [8, 9]), ("a", "bc", "d"), options, strict=True):
        user = [{"role": "user", "content": text}]
        assistant = [{"role": "assistant", "content": text.upper()}]
        columns = {"messages": user + assistant} if kind == "messages" else {"prompt": user, "completion": assistant}
        rows.append({"images": images, **columns, **choice})
    return rows


def _expected(kind: str, before: Sequence[str]) -> list[str]:
    """Return the tokens of ``_rows(kind)`` with these texts before the messages."""
    return [
        f"{first}u{2 * image}{text}\1a{text.upper()}\1"
        for first, image, text in zip(before, ("\2", "", "\2\2"), ("a", "bc", "d"), strict=True)
    ]


def _mistakes_in_batches(module: ModuleType) -> list[str]:
    """Return what is wrong with batches of equal tools, with batches that are cut, and with labels of the assistant."""
    import torch

    mistakes = []
    same = [OPTIONS[0]] * 3
    for kind in ("messages", "pairs"):
        collator = _collator(module, max_length=6)
        collator.state = SimpleNamespace(global_step=1)
        processor = collator.processor
        # In evaluation, and in a second call.
        with torch.no_grad():
            batches = [collator(_rows(kind, options)) for options in (OPTIONS, same)]
        expected = [[text[:6] for text in _expected(kind, before)] for before in (["T!", "", "VWX"], ["T!"] * 3)]
        tokens = [_texts(batch["input_ids"]) for batch in batches]
        if tokens != expected or any(batch["pixel_values"] != [[7], [], [8, 9]] for batch in batches):
            mistakes.append(f"cut, {kind} are {tokens}")
        if collator.processor is not processor:
            mistakes.append("the collator keeps the view of its processor")
    collator = _collator(module)
    batch = collator(_rows("messages")[:1])
    if _texts(batch["input_ids"]) != ["Tu\2\2a\1aA\1"]:
        mistakes.append(f"a batch of one row is {batch}")
    if not hasattr(collator, "assistant_only_loss"):
        return mistakes
    # From 1.15.0 on. A message with calls of tools may have no content.
    calls = [{"role": "assistant", "tool_calls": []}]
    text_only = [{**row, "images": [], "messages": row["messages"] + calls} for row in _rows("messages")]
    batch = collator(text_only)
    right = [text.replace("\2", "") + "a\1" for text in _expected("messages", ["T", "", "VWX"])]
    if "pixel_values" in batch or _texts(batch["input_ids"]) != right:
        mistakes.append(f"without images the batch is {batch}")
    return mistakes + _mistakes_of_the_assistant(module, same)


def _mistakes_of_the_assistant(module: ModuleType, same: Sequence[dict[str, Any]]) -> list[str]:
    """Return what is wrong with labels of the assistant's messages alone, whose template comes with the trainer."""
    mistakes = []
    # Conversations with the same tools are tokenised at once, and none a second time.
    for options, before, calls in ((OPTIONS, ("#T!", "#", "#VWX"), 4), (same, ("#T!",) * 3, 1)):
        collator = _collator(module, assistant_only_loss=True, chat_template="#")
        batch = collator(_rows("messages", options))
        labels, ids = batch["labels"], batch["input_ids"]
        if _texts(labels) != ["aA\1", "aBC\1", "aD\1"] or _texts(ids) != _expected("messages", before):
            mistakes.append(f"the labels of the assistant are {_texts(labels)}")
        if ((labels != -100) & (labels != ids)).any():
            mistakes.append("the labels of the assistant are other tokens")
        if collator.processor.calls != calls:
            mistakes.append(f"the processor is called {collator.processor.calls} times, not {calls}")
    return mistakes


def _mistakes_elsewhere(module: ModuleType) -> list[str]:
    """Return what is wrong where there is nothing to render, and with columns that are to stay."""
    mistakes = []
    for columns, kept in (
        ("those of texts", _columns(module)),
        ("the user's", _columns(module, _signature_columns=[])),
    ):
        if set(COLUMNS) & set(kept):
            mistakes.append(f"{columns} are {kept}")
    own = _columns(module, "_is_vision_dataset", "_is_vlm", _signature_columns=["images"])
    if own != ["images"]:
        mistakes.append(f"the user's own columns are {own}")
    nothing: list[dict[str, Any]] = [{"tools": []}, {"tools": None}, {"chat_template_kwargs": {}}]
    with_text = [{**_rows("messages")[0], "text": "a"}]
    batches = (_rows("messages", nothing), [{**row, "text": "a"} for row in _rows("pairs")])
    # The first row tells the format of a batch.
    for rows in (*batches, [{"images": [], "text": "a", **TOOLS[0]}, *with_text]):
        collator = _collator(module)
        processor = collator.processor
        if render_with_tools(lambda examples, own=collator: own.processor, collator, (rows,), {}) is not processor:
            mistakes.append(f"{rows}: the processor is another one")
    row, tools = {"prompt": [], **OPTIONS[0]}, [{"name": "Y"}]
    without: dict[str, Any] = {"prompt": [], "tools": None}
    calls: list[tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]] = [
        ((row, 0, tools), {}, (row, 0, tools, {})),
        ((), {"example": row, "processing_class": 0, "tools": tools, "depth": 1}, (row, 0, tools, {"depth": 1})),
        ((without, 0), {}, (without, 0, None, {})),
        (({"prompt": [], "chat_template_kwargs": None}, 0), {}, ({"prompt": []}, 0, None, {})),
        ((row, 0, None), {"depth": 1}, ({"prompt": [], **TOOLS[0]}, 0, row["tools"], {"depth": 1, "style": "!"})),
    ]
    for args, kwargs, right in calls:
        passed = pass_the_tools(_passed, None, args, kwargs)
        if passed != right or (right[0] is without and passed[0] is not without):
            mistakes.append(f"{passed} is passed on, not {right}")
    return mistakes


def _passed(example: Any, processing_class: Any, tools: Any = None, **template_kwargs: Any) -> tuple[Any, ...]:
    """Return what TRL's function would be given."""
    return example, processing_class, tools, template_kwargs


def _columns(module: ModuleType, *kinds: str, **attributes: Any) -> list[str]:
    """Return the columns that a trainer keeps, which is of these ``kinds``."""
    attributes = {"_is_vision_dataset": False, "_is_vlm": False, "_signature_columns": None, **attributes}
    attributes |= dict.fromkeys(kinds, True)
    trainer = stub_trainer(module.SFTTrainer, default_arguments(module.SFTConfig), train_dataset=None, **attributes)
    # A dataloader of the evaluation asks again.
    for _ in range(2):
        trainer._set_signature_columns_if_needed()
    columns: list[str] = trainer._signature_columns
    return columns


def _collator(module: ModuleType, **settings: Any) -> Any:
    return module.DataCollatorForVisionLanguageModeling(CharacterProcessor(), **settings)


def _texts(ids: Any) -> list[str]:
    """Return the characters of each row, without padding and without what is no label."""
    return ["".join(chr(token) for token in row if token > 0) for row in ids.tolist()]
