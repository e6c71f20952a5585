"""GRPO and RLOO close a prompt that ends with an assistant message, and open a new assistant turn after it.

Up to 0.24 ``_generate_and_score_completions`` renders prompts by ``trl.data_utils.apply_chat_template``, which passes
``continue_final_message=True`` if the last message is the assistant's. Since the refactoring of the generation in
0.25.0 the trainers call ``processing_class.apply_chat_template(..., add_generation_prompt=True)`` for all prompts: in
``_generate_single_turn``, and from 0.29.1 on in ``_tokenize_prompts``. Around this method the wrapper gives the trainer
a view of its tokenizer or processor, which decides for each prompt as ``trl.data_utils`` does.
"""

from __future__ import annotations

import inspect
import logging
from types import ModuleType
from typing import Any

from ...authoring import Call, Once, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import default_arguments, single_process, stub_that_generates, tiny_causal_lm, trainer_and_config

_first_warning_of_vllm = Once()
_first_warning_of_template = Once()


@wrapper
def continue_the_assistant(call: Call) -> Any:
    """Tokenize prompts that end with an assistant message so that the completion goes on with this message."""
    if not any(_is_prefilled(prompt) for prompt in call["prompts"]):
        return call()
    trainer = call.trainer
    with shadowed(trainer, "processing_class", _view(trainer.processing_class, trainer)):
        return call()


@wrapper
def continue_the_assistant_without_vllm(call: Call) -> Any:
    """Do the same where the method also generates. There vLLM renders the messages by itself."""
    trainer = call.trainer
    if not trainer.use_vllm:
        return continue_the_assistant(call)
    prompts = call["prompts"]
    if any(_is_prefilled(prompt) for prompt in prompts) and _first_warning_of_vllm(trainer):
        logging.getLogger("trl_hotfix").warning(
            "grpo-prefilled-assistant-turn-closed: vLLM closes the last assistant message of a prompt and opens a new "
            "turn after it. That is not repaired in this release of TRL. Said once for each trainer"
        )
    return call()


def _is_prefilled(prompt: Any) -> bool:
    """Return whether a prompt ends with an assistant message of some text, which is not the call of a tool."""
    if isinstance(prompt, str):
        return False
    last = prompt[-1]
    if last["role"] != "assistant" or last.get("tool_calls"):
        return False
    content = last.get("content") or ""
    blocks = [{"text": content}] if isinstance(content, str) else content
    return any((block.get("text") or "").strip() for block in blocks)


def _view(processing_class: Any, trainer: Any) -> Any:
    """Return a view of a tokenizer or processor whose chat template leaves the last message of the assistant open."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def apply_chat_template(self, conversation: Any, **kwargs: Any) -> Any:
            apply = self.__wrapped__.apply_chat_template
            prefilled = [_is_prefilled(prompt) for prompt in conversation]
            if not any(prefilled):
                return apply(conversation, **kwargs)
            if not all(prefilled):
                parts = [self.apply_chat_template([prompt], **kwargs) for prompt in conversation]
                return _merged(parts, self.__wrapped__)
            try:
                return apply(conversation, **{**kwargs, "add_generation_prompt": False, "continue_final_message": True})
            except ValueError as error:
                # The template may leave a part of the message out.
                if _first_warning_of_template(trainer):
                    logging.getLogger("trl_hotfix").warning(
                        "grpo-prefilled-assistant-turn-closed: the chat template cannot continue the last assistant "
                        "message, which is closed as before: %s. Said once for each trainer",
                        error,
                    )
                return apply(conversation, **kwargs)

    return View(processing_class)


def _merged(parts: list[Any], processing_class: Any) -> dict[str, Any]:
    """Return the encodings of single prompts as one batch. Tensors of tokens are padded on the left, as in TRL."""
    import torch

    merged: dict[str, Any] = {}
    for name in dict.fromkeys(name for part in parts for name in part):
        # Only prompts with images have fields of images.
        having = [part for part in parts if name in part]
        values = [part[name] for part in having]
        if all(isinstance(value, torch.Tensor) for value in values):
            if all(part[name].shape == part["input_ids"].shape for part in having):
                values = _padded(values, name, processing_class)
            merged[name] = torch.cat(values)
        else:
            merged[name] = [row for value in values for row in value]
    return merged


def _padded(values: list[Any], name: str, processing_class: Any) -> list[Any]:
    import torch

    filler = getattr(processing_class, "tokenizer", processing_class).pad_token_id if name == "input_ids" else 0
    longest = max(value.size(1) for value in values)
    return [torch.nn.functional.pad(value, (longest - value.size(1), 0), value=filler) for value in values]


def prompt_ends_with_its_last_message(module: ModuleType) -> Outcome:
    """Count the tokens of a prompt whose last message is the assistant's: 1, or 3 if it is closed and another begins.

    The chat template is one token for all messages, one for the end of the last one, and one for another header.
    """
    import torch

    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO")
    names = ("_tokenize_prompts", "_generate_single_turn")
    name = next((name for name in names if hasattr(trainer_class, name)), "")
    if not name or len(inspect.signature(getattr(trainer_class, name)).parameters) > 2:
        return absent("the prompts are rendered by trl.data_utils.apply_chat_template")

    def apply(
        conversation: Any, add_generation_prompt: bool, continue_final_message: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        ids = torch.tensor([[5] + [6] * (not continue_final_message) + [7] * add_generation_prompt])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    model = tiny_causal_lm()
    model.generate = lambda input_ids, **kwargs: torch.cat([input_ids, input_ids], dim=1)
    args, known = default_arguments(config_class), {"environment_factories": None, "_is_vlm": False}
    trainer = stub_that_generates(trainer_class, args, model, generation_config=None, generation_kwargs={}, **known)
    trainer.processing_class.apply_chat_template = apply
    prompt = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with single_process(module):
        ids, *_ = getattr(trainer, name)([prompt])
    return judge(len(ids[0]), right=1, wrong=3)
