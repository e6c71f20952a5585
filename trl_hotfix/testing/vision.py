"""A processor of texts and images without files, for the collator of SFT on images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .tokenizers import CharacterTokenizer


class CharacterProcessor:
    """A processor with ``CharacterTokenizer``. The character 2 is the place of an image, and becomes two tokens.

    An image is any object. The chat template renders the names of the tools, a ``style``, and for each message the
    first letter of the role, images, texts and the end-of-sequence token. ``calls`` counts how often it tokenised.
    """

    image_token, image_token_id = "\2", 2

    def __init__(self) -> None:
        self.tokenizer: Any = CharacterTokenizer()
        self.calls = 0

    def __call__(
        self,
        images: Any = None,
        text: Sequence[str] = (),
        padding_side: str = "right",
        truncation: bool = False,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return ``input_ids`` and ``attention_mask``, ``(rows, length)``, and the images of each row."""
        self.calls += 1
        rows = [self.tokenizer(row.replace("\2", "\2\2"))["input_ids"] for row in text]
        rows = [row[:max_length] if truncation else row for row in rows]
        batch = {
            "input_ids": _padded(rows, padding_side),
            "attention_mask": _padded([[1] * len(row) for row in rows], padding_side),
        }
        return batch if images is None else {**batch, "pixel_values": images}

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, str]] | None = None,
        tokenize: bool = False,
        add_generation_prompt: bool = False,
        return_assistant_tokens_mask: bool = False,
        processor_kwargs: Mapping[str, Any] | None = None,
        style: str = "",
        **kwargs: Any,
    ) -> Any:
        """Render one conversation or several. ``chat_template`` is a text that comes first."""
        is_single = isinstance(conversation[0], Mapping)
        conversations = [conversation] if is_single else conversation
        before = (chat_template or "") + "".join(tool["name"] for tool in tools or ()) + style
        texts = [before + "".join(map(self._message, messages)) for messages in conversations]
        texts = [text + ("a" if add_generation_prompt else "") for text in texts]
        if not tokenize:
            return texts[0] if is_single else texts
        parts = [[part for message in messages for part in message.get("content") or ()] for messages in conversations]
        images = [[part["image"] for part in row if part["type"] == "image"] for row in parts]
        # Before transformers 5.4 the arguments of the processor stand among those of the template.
        settings = kwargs if processor_kwargs is None else processor_kwargs
        batch = self(images if any(images) else None, texts, **settings)
        if return_assistant_tokens_mask:
            masks = [
                [0] * len(before)
                + [
                    int(message["role"] == "assistant")
                    for message in messages
                    for _ in self._message(message).replace("\2", "\2\2")
                ]
                for messages in conversations
            ]
            batch["assistant_masks"] = _padded(masks, "right")[:, : batch["input_ids"].shape[1]]
        return batch

    def _message(self, message: Mapping[str, Any]) -> str:
        parts = message.get("content") or ()
        contents = (self.image_token if part["type"] == "image" else part["text"] for part in parts)
        return "".join((message["role"][0], *contents, self.tokenizer.eos_token))


def _padded(rows: Sequence[list[int]], side: str) -> Any:
    import torch

    length = max(map(len, rows))
    fillers = [[0] * (length - len(row)) for row in rows]
    pairs = zip(rows, fillers, strict=True)
    return torch.tensor([filler + row if side == "left" else row + filler for row, filler in pairs])
