"""GRPO, RLOO and the distillation trainers put a second BOS before a prompt that the chat template has rendered.

Up to 0.25 (RLOO: 0.26) the trainers tokenize all texts, also those of conversations, with ``add_special_tokens=False``.
Then the template tokenizes conversations, and prompts that are texts go through ``processing_class(text=prompts)``: in
``_generate_single_turn``, and from 0.29.1 on in ``_tokenize_prompts``. The model generates from these ids, and the loss
has them too. SDPO and SDFT tokenize the prompts of their teachers by the same method.

A text is tokenized as it is, and the first of two beginnings left out of its ids: without the BOS in front, tokenizers
of SentencePiece would put a blank there.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, adds_beginning, beginning_once, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    BeginningTokenizer,
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
    trainer_and_config,
)


@wrapper
def begin_once(call: Call) -> Any:
    """Leave out the first of two beginnings (0.29.1 and later)."""
    result = call()
    processor = call.trainer.processing_class
    tokenizer = getattr(processor, "tokenizer", processor)
    if not _begin_twice(call["prompts"], tokenizer):
        return result
    twice = [tokenizer.bos_token_id] * 2
    prompt_ids, *others = result if isinstance(result, tuple) else (result,)
    once = [ids[1:] if ids[:2] == twice else ids for ids in prompt_ids]
    return (once, *others) if isinstance(result, tuple) else once


@wrapper
def generate_from_one_beginning(call: Call) -> Any:
    """Tokenize the prompts with one beginning, where the method also generates (up to 0.29.0)."""
    trainer = call.trainer
    tokenizer = trainer.processing_class
    # vLLM tokenizes texts by itself. A processor may have more fields for the model than ids and a mask.
    if trainer.use_vllm or hasattr(tokenizer, "tokenizer") or not _begin_twice(call["prompts"], tokenizer):
        return call()
    with shadowed(trainer, "processing_class", _left_padding_view(tokenizer)):
        return call()


def _begin_twice(prompts: Sequence[Any], tokenizer: Any) -> bool:
    """Return whether a prompt is a text with a beginning, and the tokenizer adds another."""
    return adds_beginning(tokenizer) and any(
        isinstance(prompt, str) and prompt.startswith(tokenizer.bos_token) for prompt in prompts
    )


def _left_padding_view(tokenizer: Any) -> Any:
    """Return a view of the tokenizer that begins each text once, and pads the batch on the left if that is asked."""
    import torch
    import wrapt

    once = beginning_once(tokenizer)

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, text: Sequence[str], *, padding: bool = False, **settings: Any) -> dict[str, Any]:
            rows = [once(each)["input_ids"] for each in text]
            if not padding:
                return {"input_ids": rows}
            gaps = [max(map(len, rows)) - len(row) for row in rows]
            padded = [[tokenizer.pad_token_id] * gap + row for gap, row in zip(gaps, rows, strict=True)]
            masks = [[0] * gap + [1] * len(row) for gap, row in zip(gaps, rows, strict=True)]
            return {"input_ids": torch.tensor(padded), "attention_mask": torch.tensor(masks)}

    return View(tokenizer)


def prompt_begins_once(module: ModuleType) -> Outcome:
    """Count the beginnings of a prompt that has its own. The tokenizer puts one before each text."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "DPPO", "GRPO", "RLOO", "Distillation", "SDPO", "SDFT")
    names = ("_tokenize_prompts", "_generate_single_turn")
    name = next((name for name in names if hasattr(trainer_class, name)), "")
    if not name or len(inspect.signature(getattr(trainer_class, name)).parameters) > 2:
        return absent("the prompts are tokenized without special tokens")
    model, tokenizer = tiny_causal_lm(), BeginningTokenizer()
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, input_ids], dim=1)
    known: dict[str, Any] = {"processing_class": tokenizer, "generation_config": None, "generation_kwargs": {}}
    trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, **known)
    with single_process(module):
        result = getattr(trainer, name)(["\2a"])
    (ids,) = result[0] if isinstance(result, tuple) else result
    return judge(ids.count(2), right=1, wrong=2)
