"""A prompt that is too long loses its beginning, and the tokenizer of the user stays as it is."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trl.experimental.a2po.a2po_trainer as a2po
import wrapt

from trl_hotfix.call import Mark
from trl_hotfix.patches.online.a2po_prompt_cut_on_the_right import _cutting_on_the_left
from trl_hotfix.testing import CharacterTokenizer, a2po_prompts, a2po_stub, digit_tokenizer, single_process

import tiny

ID = "a2po-prompt-cut-on-the-right"
PROMPTS = ["2 3 4 5 6", "7 8", "3 5 7 9"]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"

Ids = list[list[int]]


def stub(limit: int | None = 3, prompts: Any = PROMPTS, tokenizer: Any = None, **settings: Any) -> Any:
    if tokenizer is None:
        tokenizer = digit_tokenizer(**{"padding_side": "left", "chat_template": TEMPLATE, **settings})
    return a2po_stub(a2po, tokenizer, prompts, max_prompt_length=limit)


def given(trainer: Any) -> list[Ids]:
    """Return the ids of the optimal values and of a step, without padding."""
    a2po_prompts(trainer)
    batches = [zip(ids, mask, strict=True) for ids, mask in trainer.given]
    return [[ids[mask.bool()].tolist() for ids, mask in rows] for rows in batches]


def ids_of(prompts: list[str] = PROMPTS, kept: slice = slice(None)) -> Ids:
    return [[int(word) for word in prompt.split()][kept] for prompt in prompts]


def acts(trainer: Any) -> list[int | None]:
    names = ("_estimate_optimal_values", "_prepare_inputs")
    return [tiny.acts(ID, f"{a2po.__name__}:A2POTrainer.{name}", trainer) for name in names]


@pytest.mark.parametrize("padding_side", ["left", "right"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("prompts", [PROMPTS, CHATS], ids=["texts", "messages"])
@pytest.mark.parametrize("limit", [1, 2, 3, 4])
def test_prompts_keep_their_end(limit: int, prompts: Any, training: bool, padding_side: str) -> None:
    trainer = stub(limit, prompts, padding_side=padding_side)
    trainer.model.train(training)
    assert given(trainer) == [ids_of(kept=slice(-limit, None))] * 2
    assert acts(trainer) == [1, 1]


def test_trl_keeps_their_beginning(switch: Any) -> None:
    with switch.off():
        assert given(stub()) == [ids_of(kept=slice(3))] * 2


def test_values_that_a_step_estimates_are_those_of_prompts_that_keep_their_end() -> None:
    trainer = stub()
    with single_process(a2po):
        trainer._prepare_inputs(trainer.train_dataset[:1])
    assert [ids[0].tolist() for ids, _ in trainer.given] == [[4, 5, 6], [4, 5, 6]]
    assert trainer.processing_class.truncation_side == "right"


def test_without_a_limit_that_of_the_tokenizer_is_kept() -> None:
    trainer = stub(None, model_max_length=4)
    assert given(trainer) == [ids_of(kept=slice(-4, None))] * 2
    assert acts(trainer) == [1, 1]


@pytest.mark.parametrize(
    ("limit", "side"), [(5, "right"), (6, "right"), (512, "right"), (None, "right"), (3, "left"), (5, "left")]
)
def test_other_prompts_are_tokenized_as_by_trl(limit: int | None, side: str, switch: Any) -> None:
    trainer = stub(limit, truncation_side=side)
    patched = given(trainer)
    assert acts(trainer) == [0, 0]
    with switch.off():
        assert given(trainer) == patched


def test_each_batch_of_each_trainer_has_its_own_limit() -> None:
    first, second = stub(3), stub(2)
    for _ in range(2):
        assert given(first) == [ids_of(kept=slice(-3, None))] * 2
        assert given(second) == [ids_of(kept=slice(-2, None))] * 2
    assert acts(first) == acts(second) == [2, 2]


@pytest.mark.parametrize("fails", [False, True])
def test_the_tokenizer_of_the_user_stays_as_it_is(fails: bool) -> None:
    trainer = stub()
    tokenizer = trainer.processing_class
    if fails:
        trainer.model.generate = lambda **kwargs: 1 / 0
        with pytest.raises(ZeroDivisionError):
            given(trainer)
    else:
        given(trainer)
    assert trainer.processing_class is tokenizer
    assert tokenizer.truncation_side == "right"
    assert tokenizer(PROMPTS, truncation=True, max_length=2)["input_ids"] == ids_of(kept=slice(2))


def test_a_reward_function_cuts_as_it_likes() -> None:
    """It may have the same tokenizer, and is called within the method."""
    trainer, cut = stub(), list[Any]()
    tokenizer = trainer.processing_class

    def reward(prompts: Any, **kwargs: Any) -> list[float]:
        cut.append(tokenizer(prompts, truncation=True, max_length=2)["input_ids"])
        return [1.0] * len(prompts)

    trainer.reward_funcs = [reward]
    given(trainer)
    assert cut == [ids_of(kept=slice(2))] * 2


def test_a_tokenizer_without_a_side_is_given_to_trl_as_it_is() -> None:
    class Tokenizer(CharacterTokenizer):
        def __call__(self, text: Any, **kwargs: Any) -> Any:
            from transformers import BatchEncoding

            return BatchEncoding(self.pad([super(Tokenizer, self).__call__(each) for each in text]))

        def batch_decode(self, ids: Any, **kwargs: Any) -> list[str]:
            return ["" for _ in ids]

    trainer = stub(tokenizer=Tokenizer(), prompts=["ABCDE"])
    assert given(trainer) == [[list(b"ABCDE")]] * 2
    assert acts(trainer) == [0, 0]


@pytest.mark.parametrize("side", ["left", "right"])
def test_trl_has_a_view_while_the_tokenizer_cuts_on_the_right(side: str) -> None:
    trainer, seen = stub(truncation_side=side), list[Any]()
    tokenizer = trainer.processing_class

    def reward(prompts: Any, **kwargs: Any) -> list[float]:
        seen.append(trainer.processing_class is tokenizer)
        return [1.0] * len(prompts)

    trainer.reward_funcs = [reward]
    given(trainer)
    assert seen == [side == "left"] * 2


class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
    """A view of another patch."""


def test_the_side_of_what_a_view_is_a_view_of_is_set() -> None:
    tokenizer = digit_tokenizer(padding_side="left")
    assert given(stub(tokenizer=View(View(tokenizer)))) == [ids_of(kept=slice(-3, None))] * 2
    assert tokenizer.truncation_side == "right"


def test_a_view_can_be_pickled() -> None:
    view = pickle.loads(pickle.dumps(_cutting_on_the_left(digit_tokenizer(), Mark())))
    settings = {"truncation": True, "max_length": 2, "padding": True, "return_tensors": "pt"}
    assert view(text=PROMPTS, **settings)["input_ids"].tolist() == ids_of(kept=slice(-2, None))
    assert view.pad_token_id == 0
