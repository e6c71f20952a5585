"""A conversation ends with what its chat template puts at its end, and a text with the token that TRL adds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
from datasets import Dataset, DatasetDict
from trl.trainer import dpo_trainer

from trl_hotfix.testing import (
    CharacterTokenizer,
    constructed,
    default_arguments,
    recorded_warnings,
    single_process,
    stub_trainer,
    tiny_causal_lm,
)

END = CharacterTokenizer.eos_token
SIDES = ("chosen", "rejected")
PAIRS = (("a", "bc", "def"), ("gh", "i", "jk"), ("lmn", "op", "q"))
"""Prompt, chosen and rejected."""

PREPARES_ONE_DATASET = hasattr(dpo_trainer.DPOTrainer, "_prepare_dataset")
"""Up to 0.13 the constructor prepares both."""

by_the_constructor = pytest.mark.skipif(PREPARES_ONE_DATASET, reason="each dataset is prepared by itself")

Row = dict[str, Any]


class WithoutEnd(CharacterTokenizer):
    """A tokenizer whose chat template leaves the end of the last message to the trainer, after ``blank``."""

    def __init__(self, blank: str = "") -> None:
        self.blank = blank

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        rendered = super().render(messages, add_generation_prompt=add_generation_prompt)
        return rendered if add_generation_prompt else rendered.removesuffix(END) + self.blank


class EndsWithALineBreak(CharacterTokenizer):
    """A tokenizer whose chat template puts a line break behind the end of each message, as that of Qwen does."""

    def render(self, messages: list[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return super().render(messages, add_generation_prompt=add_generation_prompt).replace(END, f"{END}\n")


class Processor(CharacterTokenizer):
    """A processor of texts and images."""

    tokenizer = CharacterTokenizer()

    def __call__(self, text: str, images: Any = None, **kwargs: Any) -> Any:
        return {"input_ids": [super().__call__(text)["input_ids"]], "pixel_values": [0.0]}


def conversations(pairs: Iterable[tuple[Any, ...]] = PAIRS) -> list[Row]:
    """Return rows of one message each."""
    roles = {"prompt": "user", **dict.fromkeys(SIDES, "assistant")}
    return [
        {name: [{"role": role, "content": content}] for (name, role), content in zip(roles.items(), pair, strict=True)}
        for pair in pairs
    ]


def texts() -> list[Row]:
    return [dict(zip(("prompt", *SIDES), pair, strict=True)) for pair in PAIRS]


def ended(pairs: Iterable[tuple[Any, ...]] = PAIRS, end: str = END) -> list[str]:
    """Return the completions, the chosen of a row before the rejected, each with ``end`` behind it."""
    return [f"{completion}{end}" for _, *completions in pairs for completion in completions]


def prepared(
    *datasets: list[Row], tokenizer: Any = None, is_vision_model: bool = False, limit: int | None = None
) -> list[list[str]]:
    """Return the completions of each dataset as it is prepared: the first to train on, the others to evaluate."""
    tokenizer = tokenizer or CharacterTokenizer()
    arguments = default_arguments(dpo_trainer.DPOConfig, max_prompt_length=None, max_completion_length=limit)
    train, *evaluation = map(Dataset.from_list, datasets)
    with single_process(dpo_trainer):
        if PREPARES_ONE_DATASET:
            trainer = stub_trainer(dpo_trainer.DPOTrainer, arguments, is_vision_model=is_vision_model)
            made = [trainer._prepare_dataset(train, tokenizer, arguments, "train")]
            made += [trainer._prepare_dataset(rows, tokenizer, arguments, "eval") for rows in evaluation]
            assert not {"tokenize_row", "process_row"} & vars(trainer).keys()
        else:
            made = by_a_constructor(arguments, tokenizer, train, evaluation)
    return [[tokenizer.decode(row[f"{side}_input_ids"]) for row in dataset for side in SIDES] for dataset in made]


def by_a_constructor(arguments: Any, tokenizer: Any, train: Any, evaluation: list[Any]) -> list[Any]:
    models = [tiny_causal_lm(SimpleNamespace(is_encoder_decoder=False, model_type="tiny")) for _ in range(2)]
    for model in models:
        model.warnings_issued = {}
    several = DatasetDict({str(number): rows for number, rows in enumerate(evaluation)})
    trainer = constructed(
        dpo_trainer.DPOTrainer,
        model=models[0],
        ref_model=models[1],
        args=arguments,
        train_dataset=train,
        eval_dataset=several if len(evaluation) > 1 else next(iter(evaluation), None),
        processing_class=tokenizer,
    )
    assert not {"tokenize_row", "process_row"} & vars(trainer).keys()
    made = trainer.eval_dataset
    return [trainer.train_dataset, *(made.values() if len(evaluation) > 1 else [] if made is None else [made])]


def test_each_conversation_ends_once_in_training_and_in_evaluation() -> None:
    assert prepared(conversations(), conversations()) == [ended()] * 2


def test_trl_ends_each_conversation_twice(switch: Any) -> None:
    with switch.off():
        assert prepared(conversations(), conversations()) == [ended(end=END + END)] * 2


def test_each_trainer_has_conversations_that_end_once() -> None:
    for pairs in (PAIRS, PAIRS[1:], PAIRS[:1]):
        assert prepared(conversations(pairs), conversations(pairs)) == [ended(pairs)] * 2


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5])
def test_a_truncated_completion_keeps_its_first_tokens(limit: int) -> None:
    assert prepared(conversations(), conversations(), limit=limit) == [[text[:limit] for text in ended()]] * 2


@pytest.mark.parametrize("limit", [None, 2])
def test_a_text_ends_with_the_token_that_trl_adds(limit: int | None, switch: Any) -> None:
    made = prepared(texts(), texts(), limit=limit)
    assert made == [[text[:limit] for text in ended()]] * 2
    with switch.off():
        assert prepared(texts(), texts(), limit=limit) == made


def test_prompts_that_trl_extracts_are_conversations_too() -> None:
    rows = [{side: row["prompt"] + row[side] for side in SIDES} for row in conversations()]
    assert prepared(rows, rows) == [ended()] * 2


def test_a_line_break_of_the_template_stays() -> None:
    expected = [ended(end=f"{END}\n")] * 2
    assert prepared(conversations(), conversations(), tokenizer=EndsWithALineBreak()) == expected


@pytest.mark.parametrize("blank", ["", "\n", "  "])
def test_a_template_that_leaves_the_end_out_has_that_of_trl(blank: str) -> None:
    pairs = (("a", "bc ", "d\n"), *PAIRS)
    for rows, expected in ((PAIRS, ended(end=blank + END)), (pairs, ended(pairs, end=blank + END))):
        found = prepared(conversations(rows), conversations(rows), tokenizer=WithoutEnd(blank))
        assert found == [expected] * 2


def test_the_last_message_of_several_says_whether_the_template_ends() -> None:
    more = [{"role": "user", "content": "z"}]
    rows = [{**row, **{side: row[side] + more for side in SIDES}} for row in conversations()]
    expected = [f"{text}uz{END}" for text in ended()]
    for tokenizer in (WithoutEnd(), CharacterTokenizer()):
        assert prepared(rows, rows, tokenizer=tokenizer) == [expected] * 2


@pytest.mark.parametrize("content", ["", "  ", [{"text": "b"}]], ids=["none", "blanks", "parts"])
def test_a_message_whose_content_cannot_be_found_is_ended_by_the_template(content: Any) -> None:
    prompt: Any = [{"text": "a"}] if isinstance(content, list) else "a"
    pairs = [(prompt, content, content)]
    assert prepared(conversations(pairs), conversations(pairs)) == [ended(pairs)] * 2


@pytest.mark.skipif(not PREPARES_ONE_DATASET, reason="the constructor asks the model whether it sees images")
def test_conversations_about_images_end_once() -> None:
    rows = [{**row, "images": ["an image"]} for row in conversations()]
    assert prepared(rows, rows, tokenizer=Processor(), is_vision_model=True) == [ended()] * 2


@pytest.mark.parametrize("rows", [conversations, texts])
@pytest.mark.parametrize("evaluations", [0, 1, 2])
def test_datasets_of_one_kind_need_no_warning(rows: Callable[[], list[Row]], evaluations: int) -> None:
    with recorded_warnings() as messages:
        made = prepared(rows(), *[rows()] * evaluations)
    assert made == [ended()] * (1 + evaluations)
    assert messages == []


@by_the_constructor
@pytest.mark.parametrize(
    ("train", "evaluation"),
    [(conversations, [texts]), (texts, [conversations]), (texts, [texts, conversations])],
    ids=["conversations to train on", "conversations to evaluate", "conversations among others"],
)
def test_two_kinds_in_one_constructor_stay_as_they_are_with_a_warning(
    train: Callable[[], list[Row]], evaluation: list[Callable[[], list[Row]]]
) -> None:
    kinds = [train, *evaluation]
    with recorded_warnings() as messages:
        made = prepared(*(kind() for kind in kinds))
    assert made == [ended(end=END + END if kind is conversations else END) for kind in kinds]
    (message,) = messages
    assert "keep an end-of-sequence token too many" in message


@pytest.mark.skipif(not PREPARES_ONE_DATASET, reason="the constructor prepares all datasets in one way")
def test_each_dataset_is_prepared_by_its_kind() -> None:
    with recorded_warnings() as messages:
        assert prepared(conversations(), texts(), conversations()) == [ended()] * 3
        assert prepared(texts(), conversations()) == [ended()] * 2
    assert messages == []
