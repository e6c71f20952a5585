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

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, constructed, default_arguments, single_process, stub_trainer, tiny_causal_lm


@wrapper
def leave_the_end_to_the_template(call: Call) -> Any:
    """Wrap ``_prepare_dataset``, which prepares one dataset (0.14.0 and later)."""
    if not _template_ends_the_turn(call["dataset"], call["processing_class"]):
        return call()
    with _rows_without_the_last_token(call.trainer):
        return call()


@wrapper
def leave_the_end_of_both_to_the_template(call: Call) -> None:
    """Wrap the constructor, which prepares both datasets (0.12 and 0.13)."""
    train, evaluation, processing_class = call["train_dataset"], call["eval_dataset"], call["processing_class"]
    datasets = [train, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    ended_by_template = {
        _template_ends_the_turn(dataset, processing_class) for dataset in datasets if dataset is not None
    }
    if ended_by_template == {True}:
        with _rows_without_the_last_token(call.trainer):
            call()
        return
    if True in ended_by_template:
        logging.getLogger("trl_hotfix").warning(
            "Conversations of one dataset keep an end-of-sequence token too many, since the other dataset lacks it. "
            "Give the trainer conversations for training and for evaluation"
        )
    call()


def _template_ends_the_turn(dataset: Any, processing_class: Any) -> bool:
    """Return whether the rows are conversations that are rendered with something after their last message."""
    # TRL applies the same two functions to the rows before it tokenises them.
    from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

    first = maybe_extract_prompt(next(iter(dataset)))
    if not is_conversational(first):
        return False
    last, rendered = first["chosen"][-1].get("content"), maybe_apply_chat_template(first, processing_class)["chosen"]
    # Images, and a message without content, are taken to be ended: they are not found in what is rendered.
    return not (isinstance(last, str) and last.strip() and rendered.rstrip().endswith(last.rstrip()))


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
    """Count the tokens of two completions whose template ends each with an end of sequence; wrong is one more each."""
    trainer_class = module.DPOTrainer
    tokenize_row = getattr(trainer_class, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return absent("in this release no end-of-sequence token is added to what has been through a chat template")
    turns = {"prompt": ("user", "a"), "chosen": ("assistant", "bc"), "rejected": ("assistant", "def")}
    rows = _Rows([{name: [{"role": role, "content": text}] for name, (role, text) in turns.items()}])
    arguments = default_arguments(module.DPOConfig, max_prompt_length=None, max_completion_length=None)
    tokenizer = CharacterTokenizer()
    with single_process(module):
        if hasattr(trainer_class, "_prepare_dataset"):
            trainer = stub_trainer(trainer_class, arguments, is_vision_model=False)
            (row,) = trainer._prepare_dataset(rows, tokenizer, arguments, "train")
        else:
            # The constructor of 0.12 and 0.13 prepares the rows.
            model, ref_model = (tiny_causal_lm(SimpleNamespace(is_encoder_decoder=False, model_type="")) for _ in "ab")
            model.warnings_issued = {}
            datasets = {"train_dataset": rows, "eval_dataset": None, "processing_class": tokenizer}
            (row,) = constructed(
                trainer_class, model=model, ref_model=ref_model, args=arguments, **datasets
            ).train_dataset
    tokens = len(row["chosen_input_ids"]) + len(row["rejected_input_ids"])
    right = len("bc") + len("def") + 2
    return judge(tokens, right=right, wrong=right + 2)


class _Rows(list[dict[str, Any]]):
    """A dataset that is mapped at once. One of ``datasets`` takes some milliseconds for each map."""

    def map(
        self, function: Callable[..., Any], fn_kwargs: Any = None, remove_columns: Any = (), **options: Any
    ) -> _Rows:
        return _Rows(
            {name: value for name, value in row.items() if name not in remove_columns}
            | function(row, **(fn_kwargs or {}))
            for row in self
        )
