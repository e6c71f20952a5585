"""DPO: an end-of-sequence token is added to a conversation that its chat template has ended.

``tokenize_row`` (``process_row`` for images) puts the end-of-sequence token behind each completion, which is right for
a text. A conversation has been through the chat template before and ends as the template ends a turn; it then goes on
with one more end, ``<|im_end|>\\n<|im_end|>``. That token counts in the log-probabilities of both completions, and no
chat has it.

TRL 0.27.2 (pull request 4908) adds none to conversations. So does this, where it is the template that ends the turn:
what one renders without anything behind the last message keeps its only end-of-sequence token.

The rows are tokenised with room for one token more, and the last is dropped. That is exact whether or not the
completion is truncated to ``max_completion_length``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..stubs import (
    CharacterTokenizer,
    constructed,
    default_arguments,
    single_process,
    stream,
    stub_trainer,
    tiny_causal_lm,
)


def leave_the_end_to_the_template(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Around ``_prepare_dataset``, of one dataset (0.14.0 and later)."""
    processing_class = argument(wrapped, args, kwargs, "processing_class")
    if not _template_ends_the_turn(argument(wrapped, args, kwargs, "dataset"), processing_class):
        return wrapped(*args, **kwargs)
    with _rows_without_the_last_token(instance):
        return wrapped(*args, **kwargs)


def leave_the_end_of_both_to_the_template(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Around the constructor, which prepares both datasets (0.12 and 0.13)."""
    processing_class = argument(wrapped, args, kwargs, "processing_class")
    train, held_out = (argument(wrapped, args, kwargs, name) for name in ("train_dataset", "eval_dataset"))
    datasets = [train, *(held_out.values() if isinstance(held_out, dict) else [held_out])]
    ends = {_template_ends_the_turn(each, processing_class) for each in datasets if each is not None}
    if True not in ends:
        wrapped(*args, **kwargs)
        return
    if False in ends:
        logging.getLogger("trl_hotfix").warning(
            "Conversations of one dataset keep an end-of-sequence token too many, since the other dataset has none. "
            "Give the trainer conversations for training and for evaluation"
        )
        wrapped(*args, **kwargs)
        return
    with _rows_without_the_last_token(instance):
        wrapped(*args, **kwargs)


def _template_ends_the_turn(dataset: Any, processing_class: Any) -> bool:
    """Has the dataset conversations, and does something stand behind their last message once it is rendered?"""
    # What TRL does with the rows, before it tokenises them.
    from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

    first = maybe_extract_prompt(next(iter(dataset)))
    if not is_conversational(first):
        return False
    last = first["chosen"][-1].get("content")
    if not isinstance(last, str) or not last.strip():
        return True
    rendered: str = maybe_apply_chat_template(first, processing_class)["chosen"]
    return not rendered.rstrip().endswith(last.rstrip())


def _rows_without_the_last_token(trainer: Any) -> ExitStack:
    """In here the trainer tokenises rows without the end-of-sequence token that it adds."""

    def without_the_last(tokenize: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def tokenised(features: Any, **how: Any) -> dict[str, Any]:
            longest = how.get("max_completion_length")
            row = tokenize(features, **{**how, "max_completion_length": None if longest is None else longest + 1})
            return {**row, **{name: row[name][:-1] for name in ("chosen_input_ids", "rejected_input_ids")}}

        return tokenised

    with ExitStack() as stack:
        for name in ("tokenize_row", "process_row"):
            stack.enter_context(shadowed(trainer, name, without_the_last(getattr(trainer, name))))
        return stack.pop_all()


def conversations_end_once(module: ModuleType) -> Outcome:
    """The number of ends in a conversation of two messages, whose template ends the second with one."""
    tokenize_row = getattr(module.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return absent("in this release no end-of-sequence token is added to what has been through a chat template")
    words = CharacterTokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    rows = stream([{"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:]}])
    settings = default_arguments(module.DPOConfig, max_prompt_length=None, max_completion_length=None)
    with single_process(module):
        if hasattr(module.DPOTrainer, "_prepare_dataset"):
            trainer = stub_trainer(module.DPOTrainer, settings, is_vision_model=False)
            prepared = trainer._prepare_dataset(rows, words, settings, "train")
        else:
            prepared = _prepared_by_the_constructor(module, settings, rows, words)
    chosen = next(iter(prepared))["chosen_input_ids"]
    return judge(float(chosen.count(words.eos_token_id)), right=1.0, wrong=2.0, chosen=words.decode(chosen))


def _prepared_by_the_constructor(module: ModuleType, settings: Any, rows: Any, words: Any) -> Any:
    """What the constructor of 0.12 and 0.13 hands to transformers' own."""

    def model() -> Any:
        made = tiny_causal_lm(SimpleNamespace(is_encoder_decoder=False, model_type="tiny"))
        made.warnings_issued = {}
        return made

    trainer = constructed(
        module.DPOTrainer, model=model(), ref_model=model(), args=settings, train_dataset=rows, processing_class=words
    )
    return trainer.train_dataset
