"""Rows with an image each, a processor of images and words, and a tiny model that sees."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from . import forms, materials
from .architectures import SIZES
from .setting import CannotBeAskedError

TOKEN, TOKENS = "<image>", 4
"""What stands for an image in a text, and the tokens that the model takes for one."""

TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{{ '<image> ' if part['type'] == 'image' else part['text'] }}{% endfor %}"
    "{% endif %} {% endfor %}"
)


def given(arguments: dict[str, Any], held: str, tokenizer: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of a trainer with images in place of those without.

    ``held`` is how a row holds its image, a name of ``HELD``, and ``tokenizer`` the name of that argument. Raises
    ``CannotBeAskedError`` without Pillow.
    """
    if find_spec("PIL") is None:
        raise CannotBeAskedError("Pillow is not installed")
    changed = {"train_dataset": _rows(arguments["train_dataset"], held, folder)}
    for seed, name in enumerate(("model", "ref_model")):
        if arguments.get(name) is not None:
            changed[name] = materials.answering_as(arguments[name], _seeing(folder, seed=seed))
    return {**arguments, **changed, tokenizer: _processor(arguments[tokenizer])}


def _rows(rows: Any, held: str, folder: Path) -> Any:
    """Return the rows with an image in front of the prompt of a pair. Other rows become conversations.

    TRL itself writes the image into these.
    """
    from datasets import Dataset, Image

    def seen(number: int, row: dict[str, Any]) -> dict[str, Any]:
        pair = "chosen" in row
        words = {**row, "prompt": f"{TOKEN} {row['prompt']}"} if pair else forms.FORMS["conversation"](row, None)
        return {**words, "images": [HELD[held](_picture(number), folder / f"image-{number}.png")]}

    return Dataset.from_list([seen(*each) for each in enumerate(rows)]).cast_column("images", [Image()])


def _picture(number: int) -> Any:
    return import_module("PIL.Image").new("RGB", (4, 4), (12 * number % 256, 255 - 9 * number, 40))


def _as_path(picture: Any, path: Path) -> str:
    picture.save(path)
    return str(path)


def _as_bytes(picture: Any, path: Path) -> dict[str, Any]:
    written = io.BytesIO()
    picture.save(written, "PNG")
    return {"bytes": written.getvalue(), "path": None}


HELD: dict[str, Callable[[Any, Path], Any]] = {
    "picture": lambda picture, path: picture,
    "path": _as_path,
    "bytes": _as_bytes,
    "another": lambda picture, path: picture.point(lambda part: 255 - part),
}
"""How a row holds its image, and ``another`` image."""


def _seeing(folder: Path, *, seed: int) -> Any:
    """Return a Llava of a CLIP and a Llama of two layers from disk."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    path = folder / f"model-seeing-{seed}"
    if not path.is_dir():
        torch.manual_seed(seed)
        text = LlamaConfig(**SIZES, vocab_size=64)
        layers = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        layers |= {"num_attention_heads": SIZES["num_attention_heads"], "initializer_range": SIZES["initializer_range"]}
        vision = CLIPVisionConfig(**layers, image_size=4, patch_size=2, projection_dim=16)
        config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=63, image_token_index=63)
        config.pad_token_id, config.eos_token_id, config.image_seq_length = 0, 1, TOKENS
        LlavaForConditionalGeneration(config).save_pretrained(path)
    return LlavaForConditionalGeneration.from_pretrained(path)


def _processor(words: Any) -> Any:
    """Return a processor around a tokenizer, which gets a token for images, the last one."""
    import torch
    from transformers import BatchFeature, ProcessorMixin

    known = ("padding", "padding_side", "pad_to_multiple_of", "truncation", "max_length", "add_special_tokens")

    class Processor(ProcessorMixin):  # type: ignore[misc]
        attributes = ("tokenizer",)
        optional_attributes = ()
        image_token = TOKEN

        def __init__(self) -> None:
            self.tokenizer = words
            self.tokenizer.add_special_tokens({"additional_special_tokens": [TOKEN]})
            self.image_token_id = self.tokenizer.convert_tokens_to_ids(TOKEN)
            self.chat_template = TEMPLATE

        def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            texts = [text] if isinstance(text, str) else list(text)
            expanded = [one.replace(TOKEN, " ".join([TOKEN] * TOKENS)) for one in texts]
            options = {name: kwargs[name] for name in (*known, "return_tensors") if name in kwargs}
            data = dict(self.tokenizer(expanded, **options))
            colors = [[part / 255 for part in image.getpixel((0, 0))] for image in _flat(images or ())]
            if colors:
                data["pixel_values"] = torch.tensor(colors)[:, :, None, None].expand(-1, 3, 4, 4).contiguous()
            return BatchFeature(data)

    return Processor()


def _flat(images: Iterable[Any]) -> list[Any]:
    """Return the images of one row or of several."""
    return [one for each in images for one in (each if isinstance(each, (list, tuple)) else [each])]
