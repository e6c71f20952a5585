"""GRPO up to 0.25 and RLOO of 0.22 to 0.26 tokenize plain-text prompts without a BOS.

They pass ``add_special_tokens=False``, which is right for a prompt that the chat template has rendered, for every
prompt. vLLM up to 0.23 is given texts and puts a BOS before them: the model samples behind it, and the loss lacks it.
GRPO 0.26.0 and RLOO 0.27.0 pass it for no prompt.

``begun_with_bos`` gives the trainer a view of its tokenizer for one call.
"""

from __future__ import annotations

import inspect
from contextlib import suppress
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, begun_with_bos, judge, wrapper
from ...model import Outcome
from ...testing import (
    BeginningTokenizer,
    StopConstruction,
    completions_of,
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
    trainer_and_config,
)


@wrapper
def begin_the_prompts_of_the_rows(call: Call) -> Any:
    """Generate from prompts that begin with a BOS (up to 0.23). Those with images stay."""
    rows = call["inputs"]
    has_images = any(name in row for row in rows for name in ("image", "images"))
    return call() if has_images else begun_with_bos(call, (row["prompt"] for row in rows))


@wrapper
def begin_the_prompts(call: Call) -> Any:
    """Generate from prompts that begin with a BOS (from 0.24 on). vLLM tokenizes texts by itself."""
    has_images = "images" in inspect.signature(call.__wrapped__).parameters and call["images"] is not None
    return call() if has_images or call.trainer.use_vllm else begun_with_bos(call, call["prompts"])


def plain_prompts_begin(module: ModuleType) -> Outcome:
    """Count the beginnings of the prompt that the model is given. The tokenizer puts one before each text."""
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    if hasattr(trainer_class, "_tokenize_prompts"):
        return absent("a method of its own tokenizes the prompts, with special tokens")
    if hasattr(trainer_class, "generate_completions"):
        return absent("RLOO of this release takes tokenised prompts")
    given: list[int] = []

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        given.extend(input_ids[0].tolist())
        raise StopConstruction

    model, tokenizer = tiny_causal_lm(), BeginningTokenizer()
    model.generate = generate
    known: dict[str, Any] = {"processing_class": tokenizer, "_tokenizer": tokenizer, "generation_config": None}
    trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, **known)
    with single_process(module), suppress(StopConstruction):
        completions_of(trainer)
        # 0.14 generates in the loss.
        trainer.compute_loss(model, [{"prompt": "a"}])
    return judge(given.count(2), right=1, wrong=0)
