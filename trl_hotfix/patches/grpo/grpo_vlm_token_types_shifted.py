"""GRPO, RLOO and Distillation give a vision-language model the types of another tokenization of its prompts.

``_generate`` takes the ids of a prompt from ``apply_chat_template``, and pads them on the left. For the images
``_generate_and_score_completions`` renders the prompt once more, and calls the processor with the text, with the
special tokens and padding of the tokenizer. It drops these ids, and keeps ``token_type_ids`` or ``mm_token_type_ids``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    PromptTokenizer,
    default_arguments,
    messages,
    metrics_by_mode,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
)

_TYPES = {"token_type_ids", "mm_token_type_ids"}


@wrapper
def tokenize_as_generation_does(call: Call) -> Any:
    """Give TRL a view of the processor that tokenizes prompts with images as it does when it generates."""
    processor, inputs = call.trainer.processing_class, call["inputs"]
    has_images = any(row.get("images") or row.get("image") is not None for row in inputs)
    if not has_images or not _TYPES & set(getattr(processor, "model_input_names", ())):
        return call()
    with shadowed(call.trainer, "processing_class", _as_generated(processor)):
        return call()


def _as_generated(processor: Any) -> Any:
    """Return a view of ``processor`` that pads on the left and, as chat templates do, adds no second beginning."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("images") is not None:
                beginning = getattr(processor, "tokenizer", processor).bos_token
                begins = beginning is not None and kwargs["text"][0].startswith(beginning)
                kwargs = {"padding_side": "left", **({"add_special_tokens": False} if begins else {}), **kwargs}
            return self.__wrapped__(*args, **kwargs)

    return View(processor)


class _Processor(PromptTokenizer):
    """A processor whose template writes a beginning that the tokenizer adds too. The token 4 is an image."""

    model_input_names, bos_token = ("input_ids", "attention_mask", "token_type_ids"), "\2"

    def apply_chat_template(self, conversation: Any, tokenize: bool = False, **kwargs: Any) -> Any:
        return super().__call__(conversation, kwargs.get("return_tensors")) if tokenize else "\2text"

    def __call__(
        self, text: Any = None, return_tensors: str | None = None, add_special_tokens: bool = True, **kwargs: Any
    ) -> Any:
        import torch

        ids = torch.tensor([[2] * add_special_tokens + [3, 4]] * len(text))
        batch = {"input_ids": ids, "attention_mask": ids.clamp(max=1), "token_type_ids": (ids == 4).long()}
        return {**batch, "pixel_values": torch.ones(len(text), 1)}


def types_are_those_of_the_prompt(module: ModuleType) -> Outcome:
    """Score two completions of a prompt, whose second token is an image, and add up the places of the images."""
    import torch

    processor, completions = _Processor(), [[5, 1], [6, 1]]
    if hasattr(module, "DistillationTrainer"):

        def generate(input_ids: Any, **kwargs: Any) -> Any:
            return torch.cat([input_ids, torch.tensor(completions)], dim=1)

        model = tiny_causal_lm()
        model.generate = generate
        attributes = {"generation_config": None, "generation_kwargs": {}, "_metrics": metrics_by_mode()}
        attributes |= {"eos_token_ids": [1], "_is_vlm": False, "_total_train_tokens": 0}
        args = default_arguments(module.DistillationConfig)
        trainer = stub_that_generates(module.DistillationTrainer, args, model, **attributes)
    else:
        trainer = stub_that_scores(module, completions, [1.0, 0.0])
    trainer.processing_class = trainer._tokenizer = processor
    row = {"prompt": messages("ua"), "image": 7}
    with single_process(module):
        output = trainer._generate_and_score_completions([row, row])
    if "token_type_ids" not in output:
        return absent("this release passes no token types on")
    return judge(int(output["token_type_ids"].nonzero()[:, 1].sum()), right=2, wrong=4)
