"""DPO adds an end-of-sequence token to a conversation that its chat template has ended.

``tokenize_row`` (``process_row`` for images) adds the end-of-sequence token to each completion, which is right for a
text. A conversation has been through the chat template before. TRL 0.27.2 (pull request 4908) adds no token to
conversations.

The repair is exact whether or not the completion is truncated to ``max_completion_length``: the rows are tokenised with
a limit that is one token higher, and the last token is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    CharacterTokenizer,
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
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
    if ended_by_template == {True}:
        with _rows_without_the_last_token(instance):
            wrapped(*args, **kwargs)
        return
    if True in ended_by_template:
        logging.getLogger("trl_hotfix").warning(
            "Conversations of one dataset keep an end-of-sequence token too many, since the other dataset has none. "
            "Give the trainer conversations for training and for evaluation"
        )
    wrapped(*args, **kwargs)


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


Row = dict[str, Any]

_END = CharacterTokenizer.eos_token
_SIDES = ("chosen", "rejected")
_ROWS = (("a", "bc", "def"), ("gh", "i", "jk"))
"""Prompt, chosen and rejected."""


class _WithoutEnd(CharacterTokenizer):
    """A tokenizer whose chat template leaves the end of the last message to the trainer."""

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return super().render(messages, add_generation_prompt=add_generation_prompt).removesuffix(_END)


class _Processor(CharacterTokenizer):
    """A processor of texts and images."""

    tokenizer = CharacterTokenizer()

    def __call__(self, text: str, images: Any = None, **kwargs: Any) -> Any:
        return {"input_ids": [super().__call__(text)["input_ids"]], "pixel_values": [0.0]}


class _Rows(list[Row]):
    """A dataset that is mapped at once. One of ``datasets`` takes some milliseconds for each map."""

    def map(
        self,
        function: Callable[..., Row],
        fn_kwargs: Mapping[str, Any] = MappingProxyType({}),
        remove_columns: Sequence[str] = (),
        **options: Any,
    ) -> _Rows:
        return _Rows(
            {name: row[name] for name in row if name not in remove_columns} | function(row, **fn_kwargs) for row in self
        )


class _Datasets(dict[str, _Rows]):
    """Several datasets, as a ``DatasetDict`` has them."""

    def map(self, *args: Any, **kwargs: Any) -> _Datasets:
        return _Datasets({name: rows.map(*args, **kwargs) for name, rows in self.items()})


def conversations_end_once(module: ModuleType) -> Outcome:
    """Count the tokens of completions whose template ends each with an end of sequence: wrong is one more for each."""
    tokenize_row = getattr(module.DPOTrainer, "tokenize_row", None)
    if tokenize_row is None or "processing_class" not in tokenize_row.__code__.co_varnames:
        return absent("in this release no end-of-sequence token is added to what has been through a chat template")
    with single_process(module):
        of_template = _ended(_ROWS) * 2
        completions = _prepared(module, _conversations(_ROWS), _conversations(_ROWS))
        right = len("".join(of_template))
        outcome = judge(len("".join(completions)), right=right, wrong=right + len(of_template))
        # TRL's own repair adds no token to any conversation, also where the template leaves the end out.
        is_repaired_here = "is_chat" not in tokenize_row.__code__.co_varnames and outcome.verdict is Verdict.FIXED
        if is_repaired_here and (mistakes := list(_mistakes_elsewhere(module))):
            raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(module: ModuleType) -> Iterator[str]:
    """Say which completions are wrong: truncated, of other rows, of other templates, or of one dataset alone."""
    conversations, ended = _conversations(_ROWS), _ended(_ROWS)
    texts: list[Row] = [dict(zip(("prompt", *_SIDES), row, strict=True)) for row in _ROWS]
    without_prompt = [{side: row["prompt"] + row[side] for side in _SIDES} for row in conversations]
    answered = [
        {**row, **{side: [*row[side], {"role": "user", "content": "z"}] for side in _SIDES}} for row in conversations
    ]
    silent, in_parts = [("a", "", "")], [([{"text": "a"}],) * 3]
    cases: dict[str, tuple[list[str], list[Row], dict[str, Any]]] = {
        **{
            f"a limit of {limit}": ([text[:limit] for text in ended], conversations, {"max_completion_length": limit})
            for limit in (1, 2, 3)
        },
        "texts": (ended, texts, {}),
        "prompts that are to be extracted": (ended, without_prompt, {}),
        "a template that leaves the end out": (ended, conversations, {"tokenizer": _WithoutEnd()}),
        "several messages": ([f"{text}uz{_END}" for text in ended], answered, {"tokenizer": _WithoutEnd()}),
        "no content": (_ended(silent), _conversations(silent), {}),
        "content in parts": (_ended(in_parts), _conversations(in_parts), {}),
    }
    if hasattr(module.DPOTrainer, "_prepare_dataset"):
        with_images = [{**row, "images": ["an image"]} for row in conversations]
        cases["images"] = (ended, with_images, {"tokenizer": _Processor(), "is_vision_model": True})
    with recorded_warnings() as messages:
        for name, (expected, rows, options) in cases.items():
            if (found := _prepared(module, rows, rows, **options)) != expected * 2 or messages:
                yield f"with {name} the completions are {found}; it is said: {messages}"
    if not hasattr(module.DPOTrainer, "_prepare_dataset"):
        yield from _mistakes_of_two_datasets(module, conversations, texts)


def _mistakes_of_two_datasets(module: ModuleType, conversations: list[Row], texts: list[Row]) -> Iterator[str]:
    """Say what is wrong where the constructor prepares only one dataset, or several, or two of different kinds."""
    ended, too_long = _ended(_ROWS), [f"{completion}{_END}" for completion in _ended(_ROWS)]
    cases: tuple[tuple[list[Row], Any, list[str], int], ...] = (
        (conversations, None, ended, 0),
        (conversations, {"first": conversations, "second": conversations}, ended * 3, 0),
        (conversations, texts, too_long + ended, 1),
        (texts, {"first": texts, "second": conversations}, ended * 2 + too_long, 1),
    )
    for train, evaluation, expected, warnings in cases:
        with recorded_warnings() as messages:
            completions = _prepared(module, train, evaluation)
        if completions != expected or len(messages) != warnings:
            yield f"the completions are {completions}, and not {expected}; it is said: {messages}"


def _conversations(rows: Iterable[tuple[Any, ...]]) -> list[Row]:
    roles = {"prompt": "user", **dict.fromkeys(_SIDES, "assistant")}
    return [
        {name: [{"role": role, "content": content}] for (name, role), content in zip(roles.items(), row, strict=True)}
        for row in rows
    ]


def _ended(rows: Iterable[tuple[Any, ...]]) -> list[str]:
    return [f"{completion}{_END}" for _, *completions in rows for completion in completions]


def _prepared(
    module: ModuleType,
    train: list[Row],
    evaluation: Any,
    *,
    tokenizer: Any = None,
    is_vision_model: bool = False,
    **settings: Any,
) -> list[str]:
    """Return the completions of the two datasets as they are prepared: the chosen of a row before the rejected."""
    tokenizer = tokenizer or CharacterTokenizer()
    limits = {"max_prompt_length": None, "max_completion_length": None}
    arguments = default_arguments(module.DPOConfig, **{**limits, **settings})
    if hasattr(module.DPOTrainer, "_prepare_dataset"):
        trainer = stub_trainer(module.DPOTrainer, arguments, is_vision_model=is_vision_model)
        datasets = [
            trainer._prepare_dataset(_Rows(rows), tokenizer, arguments, name)
            for name, rows in (("train", train), ("eval", evaluation))
        ]
    else:
        datasets = _prepared_by_the_constructor(module, arguments, train, evaluation, tokenizer)
    return [tokenizer.decode(row[f"{side}_input_ids"]) for dataset in datasets for row in dataset for side in _SIDES]


def _prepared_by_the_constructor(
    module: ModuleType, arguments: Any, train: list[Row], evaluation: Any, tokenizer: Any
) -> list[Any]:
    """Return the datasets that the constructor of 0.12 and 0.13 passes to that of transformers."""

    def model() -> Any:
        lm = tiny_causal_lm(SimpleNamespace(is_encoder_decoder=False, model_type="tiny"))
        lm.warnings_issued = {}
        return lm

    several = isinstance(evaluation, dict)
    if several:
        evaluation = _Datasets({name: _Rows(rows) for name, rows in evaluation.items()})
    elif evaluation is not None:
        evaluation = _Rows(evaluation)
    trainer = constructed(
        module.DPOTrainer,
        model=model(),
        ref_model=model(),
        args=arguments,
        train_dataset=_Rows(train),
        eval_dataset=evaluation,
        processing_class=tokenizer,
    )
    prepared = trainer.eval_dataset
    return [trainer.train_dataset, *(prepared.values() if several else [prepared] if prepared is not None else [])]
