"""ORPO, CPO, KTO and BCO end a conversation twice if its chat template puts a line break behind the first end.

"Avoid adding if it's already there", says TRL of the end-of-sequence token, and looks at the last token alone. Of
``<|im_end|>\\n``, as ChatML templates end, that is the line break. ORPO and CPO add the token in ``tokenize_row``, by
``add_eos_token_if_needed``; KTO and BCO in the function ``_process_tokens`` of their modules. KTO adds none to
conversations from 1.3.0 on.

The wrapper has TRL see an end where one is. So nothing is cut off afterwards, and what ``max_length`` leaves of a row
is what it would leave of the tokens of the template. The functions that ``datasets`` maps are nested ones for affected
data only: the cache does not give what was prepared without the patch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, argument, judge, module_of, shadowed
from ...model import Outcome, Verdict
from ...testing import (
    CharacterTokenizer,
    constructed,
    default_arguments,
    single_process,
    tiny_causal_lm,
)


def leave_the_end_to_the_template(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Wrap the constructor, which prepares both datasets."""
    # 0.12.1 and later releases up to 0.15 rename this argument themselves, within the method.
    renamed = {"processing_class" if name == "tokenizer" else name: value for name, value in kwargs.items()}
    tokenizer, train, evaluation = (
        argument(wrapped, args, renamed, name) for name in ("processing_class", "train_dataset", "eval_dataset")
    )
    datasets = [train, *(evaluation.values() if isinstance(evaluation, dict) else [evaluation])]
    if not any(_ends_before_its_last_token(dataset, tokenizer) for dataset in datasets if dataset is not None):
        wrapped(*args, **kwargs)
        return
    module = module_of(wrapped)
    if hasattr(instance, "tokenize_row"):
        owner, name = instance, "tokenize_row"
        ended = _of_pairs(instance, module)
    else:
        owner, name = module, "_process_tokens"
        ended = _of_completions(module._process_tokens)
    with shadowed(owner, name, ended):
        wrapped(*args, **kwargs)


def _ends_before_its_last_token(dataset: Any, tokenizer: Any) -> bool:
    """Return whether the first row is a conversation that is rendered with an end and blanks behind it."""
    # TRL applies the same functions to the rows before it tokenises them.
    from trl.data_utils import is_conversational, maybe_apply_chat_template, maybe_extract_prompt

    first = next(iter(dataset), None)
    if first is None or not is_conversational(first):
        return False
    if tokenizer is None:
        return True  # From 1.8.0 on TRL loads that of the model. The functions below look at its tokens.
    rendered = maybe_apply_chat_template(maybe_extract_prompt(first), tokenizer)
    last = rendered["completion" if "completion" in rendered else "chosen"]
    return _is_ended(tokenizer, tokenizer(last, add_special_tokens=False)["input_ids"])


def _is_ended(tokenizer: Any, token_ids: list[int]) -> bool:
    """Return whether an end of sequence is not the last of the tokens, and only blanks are behind it."""
    if tokenizer.eos_token_id not in token_ids:
        return False
    behind = token_ids[len(token_ids) - token_ids[::-1].index(tokenizer.eos_token_id) :]
    return bool(behind) and not tokenizer.decode(behind).strip()


def _of_pairs(trainer: Any, module: ModuleType) -> Callable[..., Any]:
    """Return ``tokenize_row``, which adds no end of sequence to what has one."""
    tokenize_row, add_eos_token_if_needed = trainer.tokenize_row, module.add_eos_token_if_needed

    def add_where_missing(eos_token_id: int, *answers: dict[str, list[int]]) -> Any:
        # TRL leaves alone what ends with the token.
        stand_in = {"input_ids": [eos_token_id]}
        ended = (_is_ended(trainer.processing_class, answer["input_ids"]) for answer in answers)
        sides = (stand_in if is_end else answer for is_end, answer in zip(ended, answers, strict=True))
        add_eos_token_if_needed(eos_token_id, *sides)
        return answers

    def tokenised(*args: Any, **kwargs: Any) -> Any:
        # Here and not around the constructor: with dataset_num_proc, other processes call this.
        with shadowed(module, "add_eos_token_if_needed", add_where_missing):
            return tokenize_row(*args, **kwargs)

    return tokenised


def _of_completions(process_tokens: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``_process_tokens``, which adds no end of sequence to what has one."""

    def processed(example: Mapping[str, Any], **options: Any) -> Any:
        tokenizer, answer = options["tokenizer"], example["answer_input_ids"]
        # An encoder and decoder tokenises here, and adds no end of sequence.
        if not options.get("is_encoder_decoder") and _is_ended(tokenizer, answer):
            ends_so = SimpleNamespace(bos_token_id=tokenizer.bos_token_id, eos_token_id=answer[-1])
            options = {**options, "tokenizer": ends_so}
        return process_tokens(example, **options)

    return processed


Row = dict[str, Any]

_END = CharacterTokenizer.eos_token
_PROMPTS = ("a", "gh", "l")
_COMPLETIONS = ("bc", "def", "i", "jk", "mnop", "q")
"""Chosen and rejected in turn."""


class _Lines(CharacterTokenizer):
    """A tokenizer that ends texts with the character 3. Its chat template closes each message with ``closing``."""

    def __init__(self, closing: str = _END + "\n", eos_token: str = _END) -> None:
        self.closing, self.eos_token, self.eos_token_id = closing, eos_token, ord(eos_token)

    def __call__(self, text: Any, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        if isinstance(text, str):
            return super().__call__(text + "\3" * add_special_tokens)
        rows = [self(one, add_special_tokens) for one in text]
        return {name: [row[name] for row in rows] for name in ("input_ids", "attention_mask")}

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        text = super().render(messages, add_generation_prompt=add_generation_prompt)
        return text.replace(_END, self.closing)


class _Rows(list[Row]):
    """A dataset that is mapped at once. One of ``datasets`` takes some milliseconds for each map."""

    @property
    def column_names(self) -> list[str]:
        return list(self[0]) if self else []

    def __getitem__(self, key: Any) -> Any:
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)

    def map(
        self,
        function: Callable[..., Any],
        fn_kwargs: Mapping[str, Any] = MappingProxyType({}),
        remove_columns: Sequence[str] = (),
        batched: bool = False,
        **options: Any,
    ) -> _Rows:
        if batched:
            columns = {name: self[name] for name in self.column_names}
            columns |= function({**columns}, **fn_kwargs)
            # A dataset makes lists of arrays.
            columns = {name: [_listed(value) for value in columns[name]] for name in columns}
            changed = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        else:
            changed = [row | function(row, **fn_kwargs) for row in self]
        return _Rows({name: row[name] for name in row if name not in remove_columns} for row in changed)

    def filter(self, *args: Any, **kwargs: Any) -> _Rows:
        return self

    shuffle = filter


class _Datasets(dict[str, _Rows]):
    """Several datasets, as a ``DatasetDict`` has them."""

    def map(self, *args: Any, **kwargs: Any) -> _Datasets:
        return _Datasets({name: rows.map(*args, **kwargs) for name, rows in self.items()})


def _listed(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else value


def _side_by_side(datasets: list[_Rows], axis: int) -> _Rows:
    return _Rows({**row, **other} for row, other in zip(*datasets, strict=True))


def conversations_end_once(module: ModuleType) -> Outcome:
    """Count the tokens of completions whose template ends each with an end of sequence and a line break."""
    method = next(name for name in ("ORPO", "CPO", "KTO", "BCO") if f"{name.lower()}_trainer" in module.__name__)
    trainer_class = getattr(module, f"{method}Trainer")
    adds = getattr(trainer_class, "tokenize_row", None) or vars(module).get("_process_tokens")
    # Another patch may have a layer on it.
    if adds is None or module_of(adds) is not module or not hasattr(module, "maybe_apply_chat_template"):
        return absent("this module adds no end of sequence to what has been through a chat template")
    of_template = [f"{text}{_END}\n" for text in _COMPLETIONS]
    conversations = _rows(method, _COMPLETIONS, conversational=True)
    with single_process(module):
        ended = _completions(_prepared(module, method, conversations, conversations))
        right, wrong = (_expected(method, [f"{text}{end}" for text in of_template]) * 2 for end in ("", _END))
        lengths = [sum(map(len, completions)) for completions in (ended, right, wrong)]
        outcome = judge(lengths[0], right=lengths[1], wrong=lengths[2])
        if outcome.verdict is Verdict.FIXED:
            mistakes = [f"the completions are {ended}"] * (ended != right)
            mistakes += _mistakes_elsewhere(module, method, conversations, of_template)
            if mistakes:
                raise AssertionError("; ".join(mistakes))
    return outcome


def _mistakes_elsewhere(
    module: ModuleType, method: str, conversations: list[Row], of_template: list[str]
) -> Iterator[str]:
    """Say which completions are wrong: truncated ones, texts, those of other templates, or of one dataset alone."""
    texts = _rows(method, of_template)
    for limit in range(6, 14):
        limits: dict[str, Any] = {"max_length": limit, "max_prompt_length": 3}
        # TRL adds nothing to these texts, since the line break is the end of sequence of this tokenizer.
        expected = _prepared(module, method, texts, None, _Lines(eos_token="\n"), **limits)
        if (rows := _prepared(module, method, conversations, None, **limits)) != expected:
            yield f"with a limit of {limit}, prepared are {rows}, and not {expected}"
    # From 0.27.0 on KTO refuses an encoder and decoder.
    if method in ("ORPO", "CPO") or "is_encoder_decoder" in module._process_tokens.__code__.co_consts:
        encoder: dict[str, Any] = {"is_encoder_decoder": True, "max_completion_length": 4}
        expected = _prepared(module, method, texts, None, _Lines(eos_token="\n"), **encoder)
        if (rows := _prepared(module, method, conversations, None, **encoder)) != expected:
            yield f"with an encoder and a decoder, prepared are {rows}, and not {expected}"
    if hasattr(module, "AutoTokenizer"):
        completions = _completions(_prepared(module, method, conversations, None, loads_tokenizer=True))
        if completions != _expected(method, of_template):
            yield f"with a tokenizer that TRL loads, the completions are {completions}"
    plain = _rows(method, _COMPLETIONS)
    ended_plain = [f"{text}{_END}" for text in _COMPLETIONS]
    too_long = [f"{text}{_END}" for text in of_template]
    mixed = [text if index % 3 else f"{text}{_END}\n" for index, text in enumerate(_COMPLETIONS)]
    ended_mixed = [text if index % 3 == 0 else f"{text}{_END}" for index, text in enumerate(mixed)]
    closing = _END + "\n"
    cases: dict[str, tuple[list[list[str]], list[Row], Any, str]] = {
        "training alone": ([of_template], conversations, None, closing),
        "evaluation alone": ([ended_plain, of_template], plain, conversations, closing),
        "other texts": ([of_template, ended_mixed], conversations, _rows(method, mixed), closing),
        "texts": ([ended_plain, too_long], plain, texts, closing),
        "a template that ends with the end": ([ended_plain] * 2, conversations, conversations, _END),
    }
    for template_end in ("", "\n", f"{_END}\nx"):
        with_end = [f"{text}{template_end}{_END}" for text in _COMPLETIONS]
        cases[f"a template that ends with {template_end!r}"] = (
            [with_end] * 2,
            conversations,
            conversations,
            template_end,
        )
    if method in ("ORPO", "CPO"):
        several = {"first": plain, "second": conversations}
        cases["several"] = [ended_plain, ended_plain, of_template], plain, several, closing
        cases["no rows"] = [ended_plain, []], plain, [], closing
    for name, (completions_of_datasets, train, evaluation, template_end) in cases.items():
        completions = _completions(_prepared(module, method, train, evaluation, _Lines(template_end)))
        if completions != [
            text for completions_of in completions_of_datasets for text in _expected(method, completions_of)
        ]:
            yield f"with {name}, the completions are {completions}"
    yield from _mistakes_where_nothing_is_added(conversations, plain)


def _mistakes_where_nothing_is_added(conversations: list[Row], plain: list[Row]) -> Iterator[str]:
    """Say where the wrapper replaces ``tokenize_row`` although TRL prepares the rows right."""
    stub = SimpleNamespace(tokenize_row=plain)
    for rows, closing in (*((conversations, end) for end in ("", "\n", _END, f"{_END}\nx")), (plain, f"{_END}\n")):
        given = {"processing_class": _Lines(closing), "train_dataset": rows, "eval_dataset": None}
        try:
            leave_the_end_to_the_template(_left_alone, stub, (), given)
        except AttributeError:  # This module has nothing that adds an end.
            yield f"with {closing!r} behind a message, the wrapper acts on {rows}"


def _left_alone(processing_class: Any, train_dataset: Any, eval_dataset: Any) -> None:
    """Have the arguments of a constructor that the wrapper reads."""


def _rows(method: str, completions: Sequence[str], *, conversational: bool = False) -> list[Row]:
    """Return rows of these completions: two in a row where the trainer wants pairs. Texts are of the chat template."""

    def of(role: str, content: str) -> Any:
        return [{"role": role, "content": content}] if conversational else content

    prompts = [of("user", prompt if conversational else f"u{prompt}{_END}\na") for prompt in _PROMPTS]
    answers = [of("assistant", completion) for completion in completions]
    if method in ("ORPO", "CPO"):
        pairs = zip(prompts, answers[::2], answers[1::2], strict=True)
        return [dict(zip(("prompt", "chosen", "rejected"), pair, strict=True)) for pair in pairs]
    return [
        {"prompt": prompts[index // 2], "completion": answer, "label": index % 2 == 0}
        for index, answer in enumerate(answers)
    ]


def _expected(method: str, completions: list[str]) -> list[str]:
    """Return the completions of all rows as ``_completions`` does. KTO has that of the row before in a row, too."""
    if method != "KTO":
        return completions
    return [text for index, completion in enumerate(completions) for text in (completion, completions[index - 1])]


def _completions(datasets: list[_Rows]) -> list[str]:
    """Return the texts of all labels."""
    tokenizer = CharacterTokenizer()
    return [
        tokenizer.decode([token for token in row[name] if token >= 0])
        for rows in datasets
        for row in rows
        for name in row
        if name.endswith("_labels")
    ]


def _prepared(
    module: ModuleType,
    method: str,
    train: list[Row],
    evaluation: Any,
    tokenizer: Any = None,
    *,
    loads_tokenizer: bool = False,
    **settings: Any,
) -> list[_Rows]:
    """Return the datasets that the constructor passes to that of transformers."""
    tokenizer = tokenizer or _Lines()

    def model() -> Any:
        config = SimpleNamespace(is_encoder_decoder=settings.get("is_encoder_decoder", False), model_type="tiny")
        config.decoder_start_token_id = config.pad_token_id = 0
        config.get_text_config = lambda: config
        lm = tiny_causal_lm(config)
        lm.warnings_issued, lm.generation_config = {}, SimpleNamespace()
        return lm

    several = isinstance(evaluation, dict)
    if several:
        evaluation = _Datasets({name: _Rows(rows) for name, rows in evaluation.items()})
    elif evaluation is not None:
        evaluation = _Rows(evaluation)
    name = "tokenizer" if "deprecate_kwarg" in vars(module) else "processing_class"
    reference = {} if method in ("ORPO", "CPO") else {"ref_model": model()}
    trainer_class = getattr(module, f"{method}Trainer")
    defaults = {"max_length": 99, "max_prompt_length": 49, "remove_unused_columns": False}
    settings = {**defaults, "gradient_checkpointing": False, **settings}
    substitutes: dict[str, Any] = {
        "concatenate_datasets": _side_by_side,
        "is_sklearn_available": lambda: True,
        "AutoTokenizer": SimpleNamespace(from_pretrained=lambda *args, **kwargs: tokenizer),
    }
    with ExitStack() as stack:
        for substituted in substitutes.keys() & vars(module).keys():
            stack.enter_context(shadowed(module, substituted, substitutes[substituted]))
        trainer = constructed(
            trainer_class,
            model=model(),
            args=default_arguments(getattr(module, f"{method}Config"), **settings),
            train_dataset=_Rows(train),
            eval_dataset=evaluation,
            **{name: None if loads_tokenizer else tokenizer},
            **reference,
        )
    if "tokenize_row" in vars(trainer):
        raise AssertionError("the trainer keeps what was there for its constructor")
    prepared = trainer.eval_dataset
    return [trainer.train_dataset, *(prepared.values() if several else [prepared] if prepared is not None else [])]
