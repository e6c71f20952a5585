"""A reward model scores plain texts with the special tokens of its own tokenizer, once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest

from trl_hotfix.testing import BeginningTokenizer, NotingReward, method_that_scores, score_texts, stub_with_rewards

import tiny

ID = "reward-model-input-without-special-tokens"
MODULES = {
    "GRPO": ("trl.trainer.grpo_trainer",),
    "RLOO": ("trl.trainer.rloo_trainer",),
    "SDPO": ("trl.experimental.sdpo.sdpo_trainer",),
    "OnlineDPO": ("trl.experimental.online_dpo.online_dpo_trainer", "trl.trainer.online_dpo_trainer"),
}


def ids(text: str) -> list[int]:
    return list(map(ord, text))


class WithoutTokens(BeginningTokenizer):
    """Adds no tokens to a text."""

    bos_token = bos_token_id = None


class Bert(BeginningTokenizer):
    """Puts the character 2 before a text, as its [CLS], and has no BOS."""

    cls_token = "\2"
    bos_token = None

    def __call__(self, text: Any = None, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        self.bos_token = self.cls_token
        try:
            return super().__call__(text, add_special_tokens, **kwargs)
        finally:
            self.bos_token = None


class OnlyEnds(BeginningTokenizer):
    """Puts the character 3 behind a text, and nothing before it."""

    bos_token = bos_token_id = None

    def __call__(self, text: Any = None, add_special_tokens: bool = True, **kwargs: Any) -> Any:
        if isinstance(text, str):
            text += "\3" * add_special_tokens
        return super().__call__(text, add_special_tokens, **kwargs)


@pytest.fixture(params=MODULES)
def module(request: pytest.FixtureRequest) -> ModuleType:
    for path in MODULES[request.param]:
        try:
            module = import_module(path)
            stub_with_rewards(module, [], [])
        except (ImportError, LookupError):
            continue
        return module
    pytest.skip(f"{request.param} of this release takes no reward models in a list")


class Case:
    """A trainer with reward models that have these tokenizers; a function in place of one is a reward function."""

    def __init__(self, module: ModuleType, *tokenizers: Any) -> None:
        self.rewards = [NotingReward() if isinstance(each, BeginningTokenizer) else each for each in tokenizers]
        processors = [each if isinstance(each, BeginningTokenizer) else None for each in tokenizers]
        self.trainer = stub_with_rewards(module, self.rewards, processors)
        trainer_class = type(self.trainer).__mro__[1]
        self.method = method_that_scores(self.trainer)
        self.target = f"{trainer_class.__module__}:{trainer_class.__name__}.{self.method}"

    def rows(self, *prompts: Any, completions: Sequence[Any] = ("", "")) -> list[list[list[int]]]:
        """Score two completions, and return the ids of each row that each reward model is given."""
        for reward in self.rewards:
            if hasattr(reward, "rows"):
                reward.rows.clear()
        score_texts(self.trainer, prompts, completions)
        return [reward.rows for reward in self.rewards if hasattr(reward, "rows")]

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, self.target, self.trainer)


def constant(completions: Sequence[Any], **kwargs: Any) -> list[float]:
    return [2.0] * len(completions)


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_each_text_begins(module: ModuleType, training: bool) -> None:
    case = Case(module, BeginningTokenizer())
    case.trainer.model.train(training)
    for _ in range(2):
        assert case.rows("a", "bc") == [[ids("\2a"), ids("\2bc")]]
    assert case.acts == 2


def test_a_single_text_begins(module: ModuleType) -> None:
    case = Case(module, BeginningTokenizer())
    if not case.method.startswith("_calculate_rewards"):
        pytest.skip("the stub generates two completions")
    score_texts(case.trainer, ["a"], [""])
    assert case.rewards[0].rows == [ids("\2a")]


def test_trl_scores_texts_without_a_beginning(module: ModuleType, switch: Any) -> None:
    case = Case(module, BeginningTokenizer())
    with switch.off():
        assert case.rows("a", "bc") == [[ids("a"), ids("bc")]]


def test_the_completion_is_scored_behind_its_prompt(module: ModuleType) -> None:
    case = Case(module, BeginningTokenizer())
    if not case.method.startswith("_calculate_rewards"):
        pytest.skip("the stub decodes empty completions")
    assert case.rows("a", "b", completions=["x", "yz"]) == [[ids("\2ax"), ids("\2byz")]]


@pytest.mark.parametrize(
    ("tokenizer", "rows"), [(Bert, ["\2a", "\2bc"]), (OnlyEnds, ["a\3", "bc\3"])], ids=["CLS", "end"]
)
def test_any_token_that_the_tokenizer_adds_is_there(module: ModuleType, tokenizer: Any, rows: list[str]) -> None:
    assert Case(module, tokenizer()).rows("a", "bc") == [list(map(ids, rows))]


@pytest.mark.parametrize("tokenizer", [BeginningTokenizer, Bert], ids=["BOS", "CLS"])
def test_prompts_that_begin_by_themselves_are_left_alone(module: ModuleType, tokenizer: Any) -> None:
    case = Case(module, tokenizer())
    assert case.rows("\2a", "\2bc") == [[ids("\2a"), ids("\2bc")]]
    assert case.acts == 0


@pytest.mark.parametrize("prompts", [("\2a", "bc"), ("a", "\2bc")])
def test_no_text_begins_twice(module: ModuleType, prompts: tuple[str, str]) -> None:
    assert Case(module, BeginningTokenizer()).rows(*prompts) == [[ids("\2a"), ids("\2bc")]]


def test_each_reward_model_has_its_own_tokens(module: ModuleType) -> None:
    case = Case(module, WithoutTokens(), constant, BeginningTokenizer(), OnlyEnds())
    expected = [["a", "b"], ["\2a", "\2b"], ["a\3", "b\3"]]
    assert case.rows("a", "b") == [list(map(ids, rows)) for rows in expected]
    assert case.acts == 1


@pytest.mark.parametrize("rewards", [[WithoutTokens()], [constant]], ids=["no tokens", "function"])
def test_nothing_is_changed_where_no_tokens_are_added(module: ModuleType, rewards: list[Any]) -> None:
    case = Case(module, *rewards)
    rows = case.rows("a", "b")
    assert rows in ([], [[ids("a"), ids("b")]])
    assert case.acts == 0


def test_only_the_tokenizers_that_add_tokens_are_replaced(module: ModuleType) -> None:
    during = []

    def look(completions: Sequence[Any], **kwargs: Any) -> list[float]:
        during.append(case.trainer.reward_processing_classes)
        return constant(completions)

    case = Case(module, look, BeginningTokenizer(), WithoutTokens())
    before = case.trainer.reward_processing_classes
    case.rows("a", "b")
    (views,) = during
    assert [view is own for view, own in zip(views, before, strict=True)] == [True, False, True]


def test_a_function_with_a_tokenizer_is_left_alone(module: ModuleType) -> None:
    case = Case(module, constant)
    case.trainer.reward_processing_classes = [BeginningTokenizer()]
    case.rows("a", "b")
    assert case.acts == 0


def test_a_conversation_has_the_tokens_of_its_template(module: ModuleType) -> None:
    case = Case(module, BeginningTokenizer())
    if not case.method.startswith("_calculate_rewards"):
        pytest.skip("the stub has prompts of text")
    (tokenizer,) = case.trainer.reward_processing_classes
    tokenizer.chat_template = "set"
    tokenizer.apply_chat_template = lambda messages, **kwargs: "".join(each["content"] for each in messages)
    prompts, answers = ([[{"role": role, "content": text}] for text in texts] for role, texts in ROLES.items())
    assert case.rows(*prompts, completions=answers) == [[ids("ax"), ids("bcy")]]
    assert case.acts == 0


ROLES = {"user": ("a", "bc"), "assistant": ("x", "y")}


def test_the_trainer_has_its_tokenizers_again_after_it(module: ModuleType) -> None:
    case = Case(module, BeginningTokenizer(), constant)
    before = case.trainer.reward_processing_classes
    case.rows("a", "b")
    assert case.trainer.reward_processing_classes is before


def test_each_trainer_has_its_own_tokens(module: ModuleType) -> None:
    hit, healthy = Case(module, BeginningTokenizer()), Case(module, WithoutTokens())
    for _ in range(2):
        assert hit.rows("a", "b") == [[ids("\2a"), ids("\2b")]]
        assert healthy.rows("a", "b") == [[ids("a"), ids("b")]]
    assert (hit.acts, healthy.acts) == (2, 0)
