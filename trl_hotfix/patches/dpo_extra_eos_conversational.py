"""DPO adds an end-of-sequence token to a conversation that its chat template has ended.

``tokenize_row`` (``process_row`` for images) adds the end-of-sequence token to each completion, which is right for a
text. A conversation has been through the chat template before. TRL 0.27.2 (pull request 4908) adds no token to
conversations.

The repair is exact whether or not the completion is truncated to ``max_completion_length``: the rows are tokenised with
a limit that is one token higher, and the last token is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, argument, judge, shadowed
from ..model import Outcome
from ..testing import (
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
    """Wrap ``_prepare_dataset``, which prepares one dataset (0.14.0 and later)."""
    processing_class = argument(wrapped, args, kwargs, "processing_class")
    if not _template_ends_the_turn(argument(wrapped, args, kwargs, "dataset"), processing_class):
        return wrapped(*args, **kwargs)
    with _rows_without_the_last_token(instance):
        return wrapped(*args, **kwargs)


def leave_the_end_of_both_to_the_template(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wrap the constructor, which prepares both datasets (0.12 and 0.13)."""
    processing_class = argument(wrapped, args, kwargs, "processing_class")
    train, evaluation = (argument(wrapped, args, kwargs, name) for name in ("train_dataset", "eval_dataset"))
    datasets = [train, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    ended_by_template = {
        _template_ends_the_turn(dataset, processing_class) for dataset in datasets if dataset is not None
    }
    if True not in ended_by_template:
        wrapped(*args, **kwargs)
        return
    if False in ended_by_template:
        logging.getLogger("trl_hotfix").warning(
            "Conversations of one dataset keep an end-of-sequence token too many, since the other dataset has none. "
            "Give the trainer conversations for training and for evaluation"
        )
        wrapped(*args, **kwargs)
        return
    with _rows_without_the_last_token(instance):
        wrapped(*args, **kwargs)


def _template_ends_the_turn(dataset: Any, processing_class: Any) -> bool:
    """Return whether the rows are conversations that are rendered with something after their last message."""
    # TRL applies the same two functions to the rows before it tokenises them.
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
    """Let the trainer tokenise rows without the end-of-sequence token that it adds."""

    def without_the_last(tokenize: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def tokenised(features: Any, **options: Any) -> dict[str, Any]:
            limit = options.get("max_completion_length")
            row = tokenize(features, **{**options, "max_completion_length": None if limit is None else limit + 1})
            return {**row, **{name: row[name][:-1] for name in ("chosen_input_ids", "rejected_input_ids")}}

        return tokenised

    with ExitStack() as stack:
        for name in ("tokenize_row", "process_row"):
            stack.enter_context(shadowed(trainer, name, without_the_last(getattr(trainer, name))))
        return stack.pop_all()


def conversations_end_once(module: ModuleType) -> Outcome:
    """Count the end tokens in a conversation of two messages whose template ends the second with one."""
    tokenize_row = getattr(module.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return absent("in this release no end-of-sequence token is added to what has been through a chat template")
    tokenizer = CharacterTokenizer()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    rows = stream([{"prompt": messages[:1], "chosen": messages[1:], "rejected": messages[1:]}])
    settings = default_arguments(module.DPOConfig, max_prompt_length=None, max_completion_length=None)
    with single_process(module):
        if hasattr(module.DPOTrainer, "_prepare_dataset"):
            trainer = stub_trainer(module.DPOTrainer, settings, is_vision_model=False)
            prepared = trainer._prepare_dataset(rows, tokenizer, settings, "train")
        else:
            prepared = _prepared_by_the_constructor(module, settings, rows, tokenizer)
    chosen = next(iter(prepared))["chosen_input_ids"]
    return judge(float(chosen.count(tokenizer.eos_token_id)), right=1.0, wrong=2.0, chosen=tokenizer.decode(chosen))


def _prepared_by_the_constructor(module: ModuleType, settings: Any, rows: Any, tokenizer: Any) -> Any:
    """Return the dataset that the constructor of 0.12 and 0.13 passes to that of transformers."""

    def model() -> Any:
        lm = tiny_causal_lm(SimpleNamespace(is_encoder_decoder=False, model_type="tiny"))
        lm.warnings_issued = {}
        return lm

    trainer = constructed(
        module.DPOTrainer,
        model=model(),
        ref_model=model(),
        args=settings,
        train_dataset=rows,
        processing_class=tokenizer,
    )
    return trainer.train_dataset
