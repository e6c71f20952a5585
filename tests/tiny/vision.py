"""A tiny vision-language model, its processor, and steps of the real SFTTrainer on images.

An image is a list of three numbers, one for each colour, since the bench has neither PIL nor torchvision. The processor
is a ``ProcessorMixin``: its chat template is rendered by transformers, and it expands the image token as those of
transformers do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .data import tokenizer
from .steps import expected_gradients, stepwise
from .trainers import config, trainer

IMAGE_TOKENS = 4
"""The tokens that the model takes for an image."""

EXPANDED = " ".join(["<image>"] * IMAGE_TOKENS)

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ 'w57 ' + tool['function']['name'] + ' ' }}{% endfor %}{% endif %}"
    "{% if style %}{{ style + ' ' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'w58 ' }}{% for part in message['content'] %}"
    "{{ '<image> ' if part['type'] == 'image' else part['text'] + ' ' }}"
    "{% endfor %}{{ '<eos> ' }}"
    "{% else %}{{ 'w59 ' }}"
    "{% generation %}{{ message['content'][0]['text'] + ' <eos> ' }}{% endgeneration %}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'w59 ' }}{% endif %}"
)
"""The tools by name, a style, and for each message a word for the role, the images, the texts, and an end.

Only the words of the assistant and their end are marked as generated.
"""


def processor(template: str = TEMPLATE, *, token_types: str = "") -> Any:
    """Return a processor of texts and images with a tokenizer of 60 words and a token for images, the last one.

    ``token_types`` is the name under which it returns 1 for the tokens of images, as that of Gemma 3 does.
    """
    import torch
    from transformers import BatchFeature, ProcessorMixin

    class Processor(ProcessorMixin):  # type: ignore[misc]
        attributes = ("tokenizer",)
        optional_attributes = ()
        image_token = "<image>"
        if token_types:
            model_input_names = ("input_ids", "attention_mask", "pixel_values", token_types)

        def __init__(self) -> None:
            self.tokenizer = tokenizer()
            self.tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
            self.image_token_id = self.tokenizer.convert_tokens_to_ids("<image>")
            self.chat_template = template

        def __call__(self, images: Any = None, text: Any = None, **kwargs: Any) -> Any:
            text = [text] if isinstance(text, str) else text
            expanded = [part.replace("<image>", EXPANDED) for part in text]
            known = ("padding", "padding_side", "pad_to_multiple_of", "truncation", "max_length", "add_special_tokens")
            known += ("return_tensors", "return_offsets_mapping")
            data = dict(self.tokenizer(expanded, **{name: kwargs[name] for name in known if name in kwargs}))
            if kwargs.get("return_offsets_mapping"):
                data["text_replacement_offsets"] = [list(_replaced(part)) for part in text]
            if token_types:
                rows = [[int(token == self.image_token_id) for token in row] for row in data["input_ids"]]
                data[token_types] = torch.tensor(rows) if kwargs.get("return_tensors") else rows
            flat = [image for row in images or () for image in row]
            if flat:
                data["pixel_values"] = torch.tensor(flat)[:, :, None, None].expand(-1, 3, 4, 4).contiguous()
            return BatchFeature(data)

    return Processor()


def _replaced(text: str) -> Iterator[dict[str, tuple[int, int]]]:
    """Give the place of each image token in ``text``, and that of what takes its place."""
    gained = 0
    for match in re.finditer("<image>", text):
        begin = match.start() + gained
        yield {"span": match.span(), "new_span": (begin, begin + len(EXPANDED))}
        gained += len(EXPANDED) - len("<image>")


def llava(*, seed: int) -> Any:
    """Return a Llava of a CLIP and a Llama of two layers, whose image token is that of ``processor()``."""
    import torch
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    torch.manual_seed(seed)
    layers: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    # The weights are so large that an answer depends on what is before it.
    layers |= {"num_attention_heads": 2, "initializer_range": 0.2}
    text = LlamaConfig(
        vocab_size=64,
        **layers,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    vision = CLIPVisionConfig(**layers, image_size=4, patch_size=2, projection_dim=16)
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=63, image_token_index=63)
    config.pad_token_id, config.eos_token_id = 0, 1
    return LlavaForConditionalGeneration(config)


def gemma3(*, seed: int) -> Any:
    """Return a Gemma 3 of two layers, whose image token is that of ``processor(token_types="token_type_ids")``."""
    import torch
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    torch.manual_seed(seed)
    layers: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    layers |= {"num_attention_heads": 2}
    text = {**layers, "vocab_size": 64, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
    text |= {"initializer_range": 0.5, "sliding_window": 32, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    vision = {**layers, "image_size": 4, "patch_size": 2}
    tokens = {
        "mm_tokens_per_image": IMAGE_TOKENS,
        "image_token_index": 63,
        "boi_token_index": 62,
        "eoi_token_index": 61,
    }
    config = Gemma3Config(text_config=text, vision_config=vision, **tokens)
    config.pad_token_id, config.eos_token_id = 0, 1
    model = Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "projector" in name or "vision" in name:
                # The projection of images is made of zeros.
                torch.nn.init.normal_(weight, std=0.3)
    return model


def vision_sft(rows: list[dict[str, Any]], *, words: Any = None, trainer_arguments: Any = None, **settings: Any) -> Any:
    """Train two optimizer steps of two micro-batches of two of the eight ``rows``, evaluate three, return the trainer.

    ``words`` is the processor. The images of the evaluation are those of the rows.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    torch.manual_seed(0)
    defaults = {"gradient_accumulation_steps": 2, "max_steps": 2, "learning_rate": 0.5, "optim": "sgd"}
    sft_trainer = trainer(
        stepwise(SFTTrainer),
        model=llava(seed=0),
        args=config(SFTConfig, **{**defaults, **settings}),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:3]),
        tokenizer=processor() if words is None else words,
        **(trainer_arguments or {}),
    )
    sft_trainer.train()
    sft_trainer.evaluate()
    return sft_trainer


def everything(sft_trainer: Any) -> tuple[float, dict[str, Any]]:
    """Return the sum of all losses, and the gradients of both steps by name."""
    calls = [call for step in sft_trainer.steps for call in step.micro_batches] + sft_trainer.evaluations
    gradients = {
        f"{number} {name}": gradient
        for number, step in enumerate(sft_trainer.steps)
        for name, gradient in step.gradients.items()
    }
    return sum(call.loss for call in calls), gradients


def all_of(runs: Mapping[str, Any]) -> tuple[float, dict[str, Any]]:
    """Return the sum of all losses of all runs, and all gradients."""
    results = {name: everything(run) for name, run in runs.items()}
    gradients = {f"{name} {key}": value for name, (_, by_name) in results.items() for key, value in by_name.items()}
    return sum(loss for loss, _ in results.values()), gradients


Batch = Mapping[str, Any]
Expected = Callable[[Batch], Batch]


def rows_by_word(texts: Mapping[str, tuple[str, str]]) -> Expected:
    """Return what makes the batch of the rows that a batch has.

    ``texts`` has for each row the words that are no labels, and those after them that are. A row is known by a word
    that no other row has: its key.
    """
    import torch

    vocabulary = processor().tokenizer.get_vocab()
    rows = {}
    for word, parts in texts.items():
        before, after = ([vocabulary[word] for word in part.replace("<image>", EXPANDED).split()] for part in parts)
        rows[vocabulary[word]] = (before + after, [-100] * len(before) + after)

    def expected(batch: Batch) -> Batch:
        chosen = [rows[next(token for token in row if token in rows)] for row in batch["input_ids"].tolist()]
        length = max(len(tokens) for tokens, _ in chosen)
        tensors = {
            "input_ids": [tokens + [0] * (length - len(tokens)) for tokens, _ in chosen],
            "attention_mask": [[1] * len(tokens) + [0] * (length - len(tokens)) for tokens, _ in chosen],
            "labels": [labels + [-100] * (length - len(labels)) for _, labels in chosen],
        }
        images = {"pixel_values": batch["pixel_values"]} if "pixel_values" in batch else {}
        return {**{name: torch.tensor(value) for name, value in tensors.items()}, **images}

    return expected


def loss_of_labels(model: Any, batch: Batch, items: float) -> Any:
    """Return the cross-entropy of the labels of ``batch``, summed and divided by ``items``."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = -logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    return (losses * (labels != -100)).sum() / items


def loss_of_step(step: Any, expected: Expected) -> float:
    """Return the mean loss over the labels of an optimizer step's expected batches."""
    model = llava(seed=0)
    model.load_state_dict(step.weights)
    return sum(_losses(model, *_expected_batches(step.micro_batches, expected)))


def difference_from_labels(sft_trainer: Any, expected: Expected) -> float:
    """Return by how much a loss or an accumulated gradient differs from those of the expected batches at most.

    ``expected(batch)`` is the batch that the trainer should have been given in the place of ``batch``.
    """
    model = llava(seed=0)
    differences = []
    for step in sft_trainer.steps:
        model.load_state_dict(step.weights)
        batches, items = _expected_batches(step.micro_batches, expected)
        differences += _differences_of_losses(model, step.micro_batches, batches, items)

        def accumulated(model: Any, batches: Any = batches, items: float = items) -> Any:
            return sum(loss_of_labels(model, batch, items) for batch in batches)

        differences.append(step.difference(expected_gradients(model, step.weights, accumulated)))
    model.load_state_dict(sft_trainer.model.state_dict())
    for call in sft_trainer.evaluations:
        differences += _differences_of_losses(model, [call], *_expected_batches([call], expected))
    return max(differences)


def _items(batches: list[Batch], skipped: int = 1) -> float:
    """Return the labels of batches, by default without those of the first tokens, which are not predicted."""
    return float(sum((batch["labels"][:, skipped:] != -100).sum() for batch in batches))


def _expected_batches(calls: Any, expected: Expected) -> tuple[list[Batch], float]:
    """Return the expected batches of these calls, and by how many labels the sum of their losses is divided.

    Some releases of transformers count the first token of a row too, which is another bug; some of them in evaluation.
    """
    batches = [expected(call.inputs) for call in calls]
    counted = {call.keywords.get("num_items_in_batch") for call in calls}
    with_first = any(count is not None and float(count) == _items(batches, 0) for count in counted)
    return batches, _items(batches, 0 if with_first else 1)


def _losses(model: Any, batches: list[Batch], items: float) -> list[float]:
    import torch

    with torch.no_grad():
        return [float(loss_of_labels(model, batch, items)) for batch in batches]


def _differences_of_losses(model: Any, calls: Any, batches: list[Batch], items: float) -> list[float]:
    """Return by how much the loss of each call differs from that of its expected batch."""
    losses = _losses(model, batches, items)
    return [abs(call.loss - loss) for call, loss in zip(calls, losses, strict=True)]
