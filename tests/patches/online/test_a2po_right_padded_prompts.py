"""Every prompt ends where its completion begins, and the tokenizer of the user stays as it is."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import trl.experimental.a2po.a2po_trainer as a2po

from trl_hotfix.call import Mark
from trl_hotfix.patches.online.a2po_right_padded_prompts import _padding_on_the_left
from trl_hotfix.testing import a2po_prompts, a2po_stub, digit_tokenizer, single_process

import tiny

ID = "a2po-right-padded-prompts"
PROMPTS = ["2 3 4", "5", "6 7"]
ON_THE_LEFT = [[2, 3, 4], [0, 0, 5], [0, 6, 7]]
ON_THE_RIGHT = [[2, 3, 4], [5, 0, 0], [6, 7, 0]]
CHATS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def stub(side: str = "right", prompts: Any = PROMPTS, **settings: Any) -> Any:
    return a2po_stub(a2po, digit_tokenizer(padding_side=side, chat_template=TEMPLATE), prompts, **settings)


def given(trainer: Any) -> list[list[list[int]]]:
    """Return the ids of the optimal values and of a step. The masks fit them."""
    ids = [batch.tolist() for batch in a2po_prompts(trainer)]
    for batch, (_, mask) in zip(ids, trainer.given, strict=True):
        assert mask.tolist() == [[int(token != 0) for token in row] for row in batch]
    return ids


def acts(trainer: Any) -> list[int | None]:
    names = ("_estimate_optimal_values", "_prepare_inputs")
    return [tiny.acts(ID, f"{a2po.__name__}:A2POTrainer.{name}", trainer) for name in names]


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
@pytest.mark.parametrize("prompts", [PROMPTS, CHATS], ids=["texts", "messages"])
def test_prompts_are_padded_on_the_left(prompts: Any, training: bool) -> None:
    trainer = stub(prompts=prompts)
    trainer.model.train(training)
    assert given(trainer) == [ON_THE_LEFT] * 2
    assert acts(trainer) == [1, 1]


def test_trl_pads_them_on_the_right(switch: Any) -> None:
    with switch.off():
        assert given(stub()) == [ON_THE_RIGHT] * 2


def test_the_loss_has_the_mask_of_the_prompts_that_the_model_was_given() -> None:
    trainer = stub()
    trainer._optimal_values = dict.fromkeys(PROMPTS, 0.0)
    with single_process(a2po):
        batch = trainer._prepare_inputs(trainer.train_dataset)
    assert batch["input_ids"].tolist() == [[*row, 1] for row in ON_THE_LEFT]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 1, 1], [0, 1, 1, 1]]


def test_values_that_a_step_estimates_are_those_of_prompts_padded_on_the_left() -> None:
    trainer = stub()
    with single_process(a2po):
        trainer._prepare_inputs(trainer.train_dataset[:1])
    assert [batch.tolist() for batch, _ in trainer.given] == [ON_THE_LEFT, [[2, 3, 4]]]


@pytest.mark.parametrize(("side", "prompts"), [("left", PROMPTS), ("right", ["2 3", "4 5"]), ("right", ["2"])])
def test_other_prompts_are_padded_as_by_trl(side: str, prompts: Any, switch: Any) -> None:
    trainer = stub(side, prompts)
    patched = given(trainer)
    assert acts(trainer) == [0, 0]
    with switch.off():
        assert given(trainer) == patched


def test_a_limit_still_cuts() -> None:
    assert given(stub(max_prompt_length=2)) == [[[2, 3], [0, 5], [6, 7]]] * 2


def test_each_batch_of_each_trainer_is_padded() -> None:
    one, other = stub(), stub("left")
    for _ in range(2):
        assert given(one) == given(other) == [ON_THE_LEFT] * 2
    assert (acts(one), acts(other)) == ([2, 2], [0, 0])


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
    assert tokenizer.padding_side == "right"
    assert tokenizer(PROMPTS, padding=True)["input_ids"] == ON_THE_RIGHT


def test_a_reward_function_pads_as_it_likes() -> None:
    """It may have the same tokenizer, and is called within the method."""
    trainer, padded = stub(), list[Any]()
    tokenizer = trainer.processing_class

    def reward(prompts: Any, **kwargs: Any) -> list[float]:
        padded.append(tokenizer(prompts, padding=True)["input_ids"])
        return [1.0] * len(prompts)

    trainer.reward_funcs = [reward]
    given(trainer)
    assert padded == [ON_THE_RIGHT] * 2


def test_a_view_can_be_pickled() -> None:
    view = pickle.loads(pickle.dumps(_padding_on_the_left(digit_tokenizer(), Mark())))
    assert view(text=PROMPTS, padding=True, return_tensors="pt")["input_ids"].tolist() == ON_THE_LEFT
    assert view.pad_token_id == 0


def test_prompts_that_are_never_answered_well_are_dropped() -> None:
    """The function by which they are dropped has the trainer, and with it the view."""
    from datasets import Dataset

    trainer = stub(filter_all_incorrect=True)
    trainer.train_dataset = Dataset.from_list(trainer.train_dataset)
    trainer.accelerator.prepare = lambda loader: loader
    trainer.reward_funcs = [lambda prompts, **kwargs: [float(prompt != "5") for prompt in prompts]]
    with single_process(a2po):
        trainer._estimate_optimal_values()
    assert [row["prompt"] for row in trainer.train_dataset] == ["2 3 4", "6 7"]
