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
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, absent, argument, judge, shadowed
from ...model import Outcome
from ...testing import (
    StopConstruction,
    default_arguments,
    recorded_warnings,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
)

_first_warning_of_vllm = Once()
_first_warning_of_template = Once()


def continue_the_assistant(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Tokenize prompts that end with an assistant message so that the completion goes on with this message."""
    if not any(_is_prefilled(prompt) for prompt in argument(wrapped, args, kwargs, "prompts")):
        return wrapped(*args, **kwargs)
    with shadowed(instance, "processing_class", _view(instance.processing_class, instance)):
        return wrapped(*args, **kwargs)


def continue_the_assistant_without_vllm(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Do the same where the method also generates. There vLLM renders the messages by itself."""
    if not instance.use_vllm:
        return continue_the_assistant(wrapped, instance, args, kwargs)
    prompts = argument(wrapped, args, kwargs, "prompts")
    if any(_is_prefilled(prompt) for prompt in prompts) and _first_warning_of_vllm(instance):
        logging.getLogger("trl_hotfix").warning(
            "grpo-prefilled-assistant-turn-closed: vLLM closes the last assistant message of a prompt and opens a new "
            "turn after it. That is not repaired in this release of TRL. Said once for each trainer"
        )
    return wrapped(*args, **kwargs)


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


_LETTERS = ".acds_uxyz "
_PADDING = _LETTERS.index("_")

_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for block in message['content'] or [] %}{{ block['text'] or '' }}{% endfor %}{% endif %}"
    ".{% endfor %}{% if add_generation_prompt %}a{% endif %}"
)
"""The first letter of the role, the content and a point for each message."""

_WITHOUT_ASSISTANT = (
    "{% for message in messages if message['role'] != 'assistant' %}{{ message['content'] }}.{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def _conversation(*messages: Any, **more: Any) -> list[dict[str, Any]]:
    """Return messages of a user, an assistant, a user and so on. ``more`` is of the last one."""
    roles = ("user", "assistant")
    listed = [{"role": roles[number % 2], "content": content} for number, content in enumerate(messages)]
    return [*listed[:-1], {**listed[-1], **more}]


_OPEN: tuple[tuple[Any, str, str], ...] = (
    (_conversation("xy", "c"), "uxy.ac", "uxy.ac.a"),
    (_conversation("z", [{"type": "video"}, {"type": "text", "text": "dc "}]), "uz.adc ", "uz.adc .a"),
    (_conversation("x", "y", "zz", "cdc"), "ux.ay.uzz.acdc", "ux.ay.uzz.acdc.a"),
)
"""Conversations that end with an assistant message, their text as it should be, and as TRL has it."""

_CLOSED: tuple[tuple[Any, str], ...] = (
    (_conversation("x", "y", "z"), "ux.ay.uz.a"),
    (_conversation("x", " "), "ux.a .a"),
    (_conversation("x", None), "ux.a.a"),
    (_conversation("x", [{"type": "video"}, {"type": "text", "text": None}]), "ux.a.a"),
    (_conversation("x", "c", tool_calls=[{"name": "f"}]), "ux.ac.a"),
)
"""Conversations that do not, or whose last message has no text to go on with, and their text."""


def prompt_ends_with_its_last_message(module: ModuleType) -> Outcome:
    """Compare the ids of prompts with the text that is expected of the chat template, in uniform and mixed batches."""
    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    name = next((name for name in ("_tokenize_prompts", "_generate_single_turn") if hasattr(trainer_class, name)), "")
    if not name or len(inspect.signature(getattr(trainer_class, name)).parameters) > 2:
        return absent("the prompts are rendered by trl.data_utils.apply_chat_template")
    case = _Case(module, trainer_class, getattr(module, f"{method}Config"), name)
    first, second, _ = _OPEN
    closed = [(prompt, text, text) for prompt, text in _CLOSED]
    open_rows = 0
    for batch in ([first], list(_OPEN), [closed[0], second, first], [*_OPEN, *closed], closed[:1], closed):
        open_rows += case.open_rows(batch)
    with recorded_warnings() as warnings:
        case.tokenizer.chat_template = _WITHOUT_ASSISTANT
        for _ in range(2):
            case.open_rows([(_conversation("x", "c"), "x.a", "x.a"), (_conversation("z"), "z.a", "z.a")])
        _check_vllm(case, warnings)
    texts = case.texts(["xy", "z", ""])
    if texts != ["xy", "z", ""]:
        raise AssertionError(f"prompts without messages are {texts}")
    _check_processor()
    patched = open_rows > 0
    expected = [*["the chat template cannot"] * patched, *["vLLM closes"] * (patched and not case.is_apart)]
    if len(warnings) != len(expected) or any(part not in said for part, said in zip(expected, warnings, strict=True)):
        raise AssertionError(f"expected {expected}, and it warned of {warnings}")
    return judge(open_rows, right=9, wrong=0)


class _Case:
    """A trainer with a tokenizer of letters, and the method that tokenizes prompts, which may also generate."""

    def __init__(self, module: ModuleType, trainer_class: type, config_class: type, name: str) -> None:
        import torch

        self.module, self.name, self.tokenizer = module, name, _tokenizer()
        self.is_apart = name == "_tokenize_prompts"

        def generate(input_ids: Any, attention_mask: Any, **kwargs: Any) -> Any:
            if not torch.equal(input_ids == _PADDING, attention_mask == 0):
                raise AssertionError(f"not the padding is masked: {input_ids}, {attention_mask}")
            return torch.cat([input_ids, torch.ones_like(input_ids)], dim=1)

        model = tiny_causal_lm()
        model.generate = generate
        self.trainer = stub_that_generates(
            trainer_class,
            default_arguments(config_class),
            model,
            processing_class=self.tokenizer,
            generation_config=None,
            generation_kwargs={},
            environment_factories=None,
            _is_vlm=False,
        )

    def texts(self, prompts: list[Any]) -> list[str]:
        """Return the texts of the prompts' ids."""
        with single_process(self.module):
            ids, *_ = getattr(self.trainer, self.name)(prompts)
        if self.trainer.processing_class is not self.tokenizer:
            raise AssertionError("the trainer has another tokenizer")
        return ["".join(_LETTERS[token] for token in row) for row in ids]

    def open_rows(self, batch: Sequence[tuple[Any, str, str]]) -> int:
        """Return how many prompts of the batch end with an open message. All that should, or none."""
        texts = self.texts([prompt for prompt, _, _ in batch])
        as_expected, as_in_trl = ([row[column] for row in batch] for column in (1, 2))
        if texts not in (as_expected, as_in_trl):
            raise AssertionError(f"{texts}: neither {as_expected} nor {as_in_trl}")
        return sum(right != wrong for _, right, wrong in batch) if texts == as_expected else 0


def _tokenizer() -> Any:
    """Return a tokenizer of transformers' own, whose tokens are letters."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    word_level = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(_LETTERS)}, unk_token="_"))
    word_level.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level, pad_token="_", eos_token=".", padding_side="left")
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def _check_vllm(case: _Case, warnings: list[str]) -> None:
    """Check that vLLM, where it renders the messages, is given them as they are, and who is warned."""
    if case.is_apart:
        return
    trainer, tokenizers, counts = case.trainer, [], []

    def stop() -> None:
        tokenizers.append(trainer.processing_class)
        raise StopConstruction

    vllm = {"use_vllm": True, "vllm_mode": "server", "_last_loaded_step": -1}
    vars(trainer).update(vllm, _move_model_to_vllm=stop, vllm_generation=SimpleNamespace(sync_weights=stop))
    for prompt in (_CLOSED[0][0], _OPEN[0][0], _OPEN[0][0]):
        with suppress(StopConstruction), single_process(case.module):
            trainer._generate_single_turn([prompt])
        counts.append(len(warnings))
    vars(trainer).update(use_vllm=False)
    closed, first, second = counts
    if tokenizers != [case.tokenizer] * 3 or first != second or closed > 1:
        raise AssertionError(f"vLLM was given {tokenizers}, with so many warnings: {counts}")


def _check_processor() -> None:
    """Check a mixed batch of a processor, which has a tokenizer: tokens are padded, and images joined."""
    import torch

    def apply(conversation: Any, **kwargs: Any) -> dict[str, Any]:
        ids = torch.tensor([[7] * len(prompt) for prompt in conversation])
        tokens = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        (prompt,) = conversation
        images = torch.tensor([[1.0], [2.0]]) * len(prompt)
        return {**tokens, "pixel_values": images} if len(prompt) > 2 else tokens

    processor = SimpleNamespace(apply_chat_template=apply, tokenizer=SimpleNamespace(pad_token_id=3))
    batch = _view(processor, None).apply_chat_template([_OPEN[0][0], _OPEN[2][0], _CLOSED[0][0]])
    expected = {
        "input_ids": [[3, 3, 7, 7], [7, 7, 7, 7], [3, 7, 7, 7]],
        "attention_mask": [[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]],
        "pixel_values": [[4.0], [8.0], [3.0], [6.0]],
    }
    if {name: value.tolist() for name, value in batch.items()} != expected:
        raise AssertionError(f"a mixed batch is {batch}")
