"""GRPO and RLOO cut the end of a prompt that is longer than ``max_prompt_length``, and not its beginning.

TRL 0.24.0 (pull request 4153) leaves the cut to the tokenizer, in ``_generate_single_turn``: ``truncation=True,
max_length=self.max_prompt_length``. The tokenizer cuts at its ``truncation_side``, which is the right one by default.
TRL sets the left one on a tokenizer that it loads itself, and not on one that it is given. 0.26.0 removes the limit
from GRPO, 0.27.0 from RLOO.

The method both samples from these ids and returns them for the loss. Around it the wrapper gives the trainer a view of
the tokenizer, which has it cut nothing and keeps the last ids itself. So the user's tokenizer stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, single_process, stub_that_generates, tiny_causal_lm, trainer_and_config


@wrapper
def keep_the_end(call: Call) -> Any:
    """Call the method with a view of the tokenizer, unless vLLM cuts the prompts, or the tokenizer cuts on the left."""
    trainer = call.trainer
    tokenizer = trainer.processing_class
    # A processor has no side of its own. Of images every token is needed, and they come first.
    if trainer.use_vllm or getattr(tokenizer, "truncation_side", "left") == "left":
        return call()
    trainer.processing_class = _keeping_the_end(tokenizer, call.act_later())
    try:
        return call()
    finally:
        trainer.processing_class = tokenizer


def _keeping_the_end(tokenizer: Any, act: Callable[[], None]) -> Any:
    """Return a view of a tokenizer, whose truncation keeps the last ids. It calls ``act`` where it cuts."""
    import torch
    import wrapt

    def encode(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("truncation"):
            return function(*args, **kwargs)
        limit = kwargs.pop("max_length")
        limit = tokenizer.model_max_length if limit is None else limit
        encoded = function(*args, **{**kwargs, "truncation": False})
        if max(map(len, encoded["input_ids"])) > limit:
            act()
            for name, rows in encoded.items():
                # Tensors are padded on the left.
                cut = rows[:, -limit:] if isinstance(rows, torch.Tensor) else [row[-limit:] for row in rows]
                encoded[name] = cut
        return encoded

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return encode(self.__wrapped__, *args, **kwargs)

        def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
            return encode(self.__wrapped__.apply_chat_template, *args, **kwargs)

    return View(tokenizer)


def prompts_keep_their_end(module: ModuleType) -> Outcome:
    """Compare the ids of a prompt of five words with a limit of three with its last three, and with its first three."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    parameters = inspect.signature(trainer_class._generate_single_turn).parameters
    if "prompts" not in parameters:
        return absent("the prompts are tokenized by a method that knows no limit")
    model = tiny_causal_lm()
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, torch.ones_like(input_ids)], dim=1)
    settings = {"processing_class": _words(), "max_prompt_length": 3, "_is_vlm": False}
    trainer = stub_that_generates(
        trainer_class, default_arguments(config_class), model, generation_config=None, generation_kwargs={}, **settings
    )
    with single_process(module):
        (ids,), *_ = trainer._generate_single_turn(["2 3 4 5 6"], *[None] * ("images" in parameters))
    if ids == [2, 3, 4, 5, 6]:
        return absent("in this release max_prompt_length cuts nothing")
    return judge(_number(ids), right=456, wrong=234)


def _number(ids: list[int]) -> int:
    """Return the number with these digits."""
    return int("".join(map(str, ids)))


def _words() -> Any:
    """Return a tokenizer of transformers' own, whose tokens are digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel({str(digit): digit for digit in range(10)}, unk_token="0"))
    word_level.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="0", eos_token="1")
