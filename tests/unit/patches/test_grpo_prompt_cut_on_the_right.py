"""The beginning of prompts is cut where the tokenizer would cut their end; the user's tokenizer stays as it is."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from trl_hotfix.call import Call, takes_call
from trl_hotfix.patches.grpo import grpo_prefilled_assistant_turn_closed as prefilled
from trl_hotfix.patches.grpo import grpo_prompt_cut_on_the_right as patch

TEMPLATE = (
    "{% for message in messages %}8 {{ message['content'] }} {% endfor %}{% if add_generation_prompt %}9{% endif %}"
)
PROMPTS = ["2 3 4 5 6", "7", "2 3 4", "5 6 7 8"]
LAST = [[4, 5, 6], [7], [2, 3, 4], [6, 7, 8]]
FIRST = [[2, 3, 4], [7], [2, 3, 4], [5, 6, 7]]


@pytest.fixture
def tokenizer() -> Any:
    words = patch._words()
    words.chat_template, words.padding_side = TEMPLATE, "left"
    return words


def trainer_with(tokenizer: Any, **attributes: Any) -> Any:
    return SimpleNamespace(**{"processing_class": tokenizer, "use_vllm": False, "limit": 3, **attributes})


def tokenize(trainer: Any, prompts: list[Any], **settings: Any) -> Any:
    """Tokenize as TRL does, for ``generate`` and, without tensors, for ``generate_batch``."""
    keywords = {"max_length": trainer.limit, "truncation": True, "add_special_tokens": False, **settings}
    if isinstance(prompts[0], str):
        return trainer.processing_class(text=prompts, **keywords)
    keywords |= {"add_generation_prompt": True, "tokenize": True, "return_dict": True}
    return trainer.processing_class.apply_chat_template(conversation=prompts, **keywords)


def called(trainer: Any, prompts: list[Any], *wrappers: Any, **settings: Any) -> Any:
    """Tokenize within the wrappers, the first of which is the outermost."""

    def method(prompts: list[Any]) -> Any:
        return tokenize(trainer, prompts, **settings)

    def within(wrapper: Any, inner: Any) -> Any:
        if takes_call(wrapper):
            return lambda prompts: wrapper(Call(inner, trainer, (prompts,)))
        return lambda prompts: wrapper(inner, trainer, (prompts,), {})

    for wrapper in reversed(wrappers or (patch.keep_the_end,)):
        method = within(wrapper, method)
    return method(prompts)


def messages(*contents: str) -> list[dict[str, str]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


TENSORS = {"return_tensors": "pt", "padding": True}


def test_each_row_keeps_its_end_and_is_padded_on_the_left(tokenizer: Any) -> None:
    encoded = called(trainer_with(tokenizer), PROMPTS, **TENSORS)
    assert encoded["input_ids"].tolist() == [[4, 5, 6], [0, 0, 7], [2, 3, 4], [6, 7, 8]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1], [1, 1, 1], [1, 1, 1]]


def test_it_is_what_the_tokenizer_gives_that_cuts_on_the_left(tokenizer: Any) -> None:
    of_the_view = called(trainer_with(tokenizer), PROMPTS, **TENSORS)
    tokenizer.truncation_side = "left"
    own = tokenize(trainer_with(tokenizer), PROMPTS, **TENSORS)
    assert {name: rows.tolist() for name, rows in of_the_view.items()} == {
        name: rows.tolist() for name, rows in own.items()
    }


def test_rows_without_padding_keep_their_end(tokenizer: Any) -> None:
    encoded = called(trainer_with(tokenizer), PROMPTS)
    assert encoded["input_ids"] == LAST
    assert encoded["attention_mask"] == [[1] * len(ids) for ids in LAST]
    assert encoded.input_ids == LAST, "as 0.24.0 reads them"


def test_messages_keep_the_header_of_the_answer(tokenizer: Any) -> None:
    encoded = called(trainer_with(tokenizer), [messages("2 3 4"), messages("5")])
    assert encoded["input_ids"] == [[3, 4, 9], [8, 5, 9]]


@pytest.mark.parametrize("order", [1, -1])
def test_messages_that_another_patch_leaves_open_are_cut_too(tokenizer: Any, order: int) -> None:
    wrappers = [patch.keep_the_end, prefilled.continue_the_assistant][::order]
    prompts = [messages("2", "3 4 5"), messages("5")]
    encoded = called(trainer_with(tokenizer), prompts, *wrappers, **TENSORS)
    assert encoded["input_ids"].tolist() == [[3, 4, 5], [8, 5, 9]]
    assert encoded["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_without_a_limit_that_of_the_tokenizer_cuts(tokenizer: Any) -> None:
    tokenizer.model_max_length = 4
    assert called(trainer_with(tokenizer, limit=None), PROMPTS)["input_ids"][0] == [3, 4, 5, 6]


def test_without_any_limit_nothing_is_cut(tokenizer: Any) -> None:
    encoded = called(trainer_with(tokenizer, limit=None), PROMPTS, **TENSORS)
    assert encoded["input_ids"].tolist()[0] == [2, 3, 4, 5, 6]


def test_a_call_that_asks_for_no_truncation_gets_none(tokenizer: Any) -> None:
    encoded = called(trainer_with(tokenizer), PROMPTS, truncation=False)
    assert encoded["input_ids"][0] == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("prompts", [PROMPTS, [messages("2 3 4"), messages("5")]])
def test_the_users_tokenizer_stays_as_it_is(tokenizer: Any, prompts: list[Any]) -> None:
    before, trainer = vars(tokenizer).copy(), trainer_with(tokenizer)
    called(trainer, prompts)
    assert trainer.processing_class is tokenizer
    assert vars(tokenizer) == before
    assert tokenize(trainer, PROMPTS)["input_ids"] == FIRST


def test_the_trainer_has_its_tokenizer_again_after_an_error(tokenizer: Any) -> None:
    trainer = trainer_with(tokenizer)

    def fail() -> None:
        assert trainer.processing_class is not tokenizer
        raise ValueError("the model cannot generate")

    with pytest.raises(ValueError, match="cannot generate"):
        patch.keep_the_end(Call(fail, trainer))
    assert trainer.processing_class is tokenizer
    assert tokenizer.truncation_side == "right"


def test_vllm_a_processor_and_a_tokenizer_that_cuts_on_the_left_are_left_alone(tokenizer: Any) -> None:
    left = patch._words()
    left.truncation_side = "left"
    processor = SimpleNamespace(tokenizer=tokenizer)
    for own, settings in ((tokenizer, {"use_vllm": True}), (processor, {}), (left, {})):
        trainer = trainer_with(own, **settings)
        given = patch.keep_the_end(Call(lambda trainer=trainer: trainer.processing_class, trainer))
        assert given is own


@pytest.mark.parametrize(("prompts", "acts"), [(PROMPTS, 1), (["2 3 4", "5"], 0), (["7"], 0), (["2 3 4 5"], 1)])
def test_it_acts_where_it_cuts(tokenizer: Any, prompts: list[str], acts: int) -> None:
    marks: list[None] = []
    view = patch._keeping_the_end(tokenizer, lambda: marks.append(None))
    tokenize(trainer_with(view), prompts)
    assert len(marks) == acts
