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
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import CharacterProcessor, messages, stub_trainer

COLUMNS = ("tools", "chat_template_kwargs")

_OF_THE_TEMPLATE = frozenset(
    {"chat_template", "tokenize", "return_dict", "return_assistant_tokens_mask", "processor_kwargs"}
)
"""The arguments of ``apply_chat_template`` in the collator that are not the processor's."""


@wrapper
def keep_the_columns(call: Call) -> None:
    """Name the two columns among those that a dataset of images keeps."""
    trainer = call.trainer
    is_new = trainer._signature_columns is None
    call()
    if is_new and "images" in trainer._signature_columns:
        # A stream may not know its columns.
        if set(COLUMNS) & set(getattr(trainer.train_dataset, "column_names", None) or COLUMNS):
            call.act()
        trainer._signature_columns += COLUMNS


@wrapper
def render_with_tools(call: Call) -> Any:
    """Let the processor render each conversation of a batch with what its row has for the chat template."""
    collator, examples = call.trainer, call["examples"]
    options = [_options(row) for row in examples]
    if "messages" not in examples[0] or not any(options):
        return call()
    with shadowed(collator, "processor", _rendering_with(collator.processor, options)):
        return call()


@wrapper
def pass_the_tools(call: Call) -> Any:
    """Render a prompt and its completion with what the row has for the chat template."""
    example = call["example"]
    options = _options(example)
    if not (options or COLUMNS[1] in example) or call["tools"] is not None:
        return call()
    tools = options.pop("tools", None)
    # From 0.24.0 on TRL takes the others from the row itself. It cannot take them twice, nor None.
    row = {name: value for name, value in example.items() if name != COLUMNS[1]}
    return call.with_(example=row, tools=tools, template_kwargs={**call["template_kwargs"], **options})()


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
    """Return the batch of conversations with different options. ``kwargs`` come from the collator's own call."""
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
    """Count where the tool T arrives: in the columns that are kept, in a conversation, and in a prompt."""
    if not hasattr(module, "DataCollatorForVisionLanguageModeling"):
        return absent("this release has no collator of images")
    columns = {"_is_vision_dataset": True, "_is_vlm": True, "_signature_columns": None, "train_dataset": None}
    trainer = stub_trainer(module.SFTTrainer, SimpleNamespace(), **columns)
    trainer._set_signature_columns_if_needed()
    collator = module.DataCollatorForVisionLanguageModeling(CharacterProcessor())
    rows: tuple[dict[str, Any], ...] = (
        {"messages": messages("ub", "ac")},
        {"prompt": messages("ub"), "completion": messages("ac")},
    )
    texts = [collator([{"images": [7], "tools": [{"name": "T"}], **row}])["input_ids"] for row in rows]
    arrived = ["tools" in trainer._signature_columns, *(ord("T") in text for text in texts)]
    return judge(sum(arrived), right=3, wrong=0)
