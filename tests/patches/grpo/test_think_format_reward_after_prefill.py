"""Answers after a prompt that opens ``<think>`` are judged with this tag, and all others as TRL judges them."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

import pytest
import torch
import trl.rewards
from trl.rewards import think_format_reward
from trl.trainer import grpo_trainer, rloo_trainer

from trl_hotfix.testing import (
    PromptTokenizer,
    default_arguments,
    single_process,
    stub_that_generates,
    stub_that_scores,
    tiny_causal_lm,
    trainer_and_config,
)

import tiny

ID = "think-format-reward-after-prefill"
METHODS = ("_calculate_rewards", "_calculate_rewards_from_functions", "_generate_and_score_completions")
FIRST = 5
"""The token of the first completion. Each completion is one token and an end of sequence."""

Row = tuple[str, str, float, float]
"""What the prompt ends with, the completion, its reward in TRL, and the right one."""

OPEN: list[Row] = [
    ("<think>", "a</think>b", 0.0, 1.0),
    ("<think>\n", "\na\n\n</think>\nb", 0.0, 1.0),
    ("<think>\n\n", "</think>", 0.0, 1.0),
]
AS_IN_TRL: list[Row] = [
    ("<think>", "a b", 0.0, 0.0),
    ("<think>", "a<think>b</think>c", 0.0, 0.0),
    ("<think>", "<think>a</think>b", 1.0, 1.0),
    ("", "a</think>b", 0.0, 0.0),
    ("", "<think>a</think>b", 1.0, 1.0),
    ("<think>\n</think>\n", "a</think>b", 0.0, 0.0),
]


class Tokenizer(PromptTokenizer):
    """Its template puts the user's last message behind the header of the assistant, and thinks unless told not to."""

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = texts

    def apply_chat_template(
        self,
        conversation: Any,
        *,
        tokenize: bool,
        add_generation_prompt: bool = False,
        enable_thinking: bool = True,
        **kwargs: Any,
    ) -> str:
        assert not tokenize
        opened = conversation[-1]["content"] if add_generation_prompt and enable_thinking else ""
        return f"user: {conversation[0]['content']} assistant: {opened}"

    def batch_decode(self, ids: Any, skip_special_tokens: bool = False, **kwargs: Any) -> list[str]:
        assert skip_special_tokens
        return [self.texts[int(row[0]) - FIRST] for row in ids]


def moved(name: str) -> ModuleType:
    for path in (f"trl.experimental.{name}", f"trl.trainer.{name.partition('.')[2]}"):
        try:
            module = import_module(path)
        except ImportError:
            continue
        trainer_class, _ = trainer_and_config(module, "SDPO", "OnlineDPO")
        if any(hasattr(trainer_class, method) for method in METHODS):
            return module
    pytest.skip("this release has no such trainer, or gives it no reward functions")


@pytest.fixture(params=["GRPO", "RLOO", "SDPO", "OnlineDPO"])
def module(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "GRPO":
        return grpo_trainer
    if request.param != "RLOO":
        return moved({"SDPO": "sdpo.sdpo_trainer", "OnlineDPO": "online_dpo.online_dpo_trainer"}[request.param])
    if not hasattr(rloo_trainer.RLOOTrainer, "_calculate_rewards"):
        pytest.skip("RLOO of this release takes no reward functions")
    return rloo_trainer


def user(end: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": end}]


class Scoring:
    """A trainer that scores completions of these texts."""

    def __init__(
        self, module: ModuleType, texts: Sequence[str], functions: Any = None, *, training: bool = True, **known: Any
    ) -> None:
        self.module, self.count = module, len(texts)
        trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "SDPO", "OnlineDPO")
        functions = [think_format_reward] if functions is None else functions
        self.method = next(method for method in METHODS if hasattr(trainer_class, method))
        self.target = f"{module.__name__}:{trainer_class.__name__}.{self.method}"
        model = tiny_causal_lm(vocabulary=16).train(training)
        if self.method == "_generate_and_score_completions":
            ids = [[FIRST + row, 1] for row in range(self.count)]
            self.trainer = stub_that_scores(
                module, ids, [0.0] * self.count, model=model, reference=model, training=training
            )
        else:
            self.trainer = stub_that_generates(trainer_class, default_arguments(config_class), model, environments=None)
        vars(self.trainer).update(
            processing_class=Tokenizer(texts),
            reward_funcs=functions,
            reward_processing_classes=[None] * len(functions),
            reward_func_names=[f"reward {number}" for number in range(len(functions))],
            reward_weights=torch.ones(len(functions)),
            **known,
        )

    def rewards(
        self, prompts: Sequence[Any], contents: Sequence[str] | None = None, more: Sequence[dict[str, str]] = ()
    ) -> list[float]:
        """Return the sum of the rewards of each completion. Its content is its text, unless ``contents`` says.

        ``more`` are later messages of each completion, in releases with tools.
        """
        texts = self.trainer.processing_class.texts if contents is None else contents
        scored: dict[str, Any] = {
            "prompts": prompts,
            "completions": [[{"role": "assistant", "content": text}, *more] for text in texts],
            "completion_ids_list": [[FIRST + row, 1] for row in range(self.count)],
        }
        inputs = [{"prompt": prompt} for prompt in prompts]
        with single_process(self.module):
            if self.method == "_calculate_rewards_from_functions":
                return self.trainer._calculate_rewards_from_functions(**scored).tolist()
            if self.method == "_calculate_rewards":
                return self.trainer._calculate_rewards(inputs=inputs, **scored).sum(1).tolist()
            logged: dict[str, list[float]] = self.trainer._textual_logs["rewards"]
            logged.clear()
            self.trainer._generate_and_score_completions(inputs)
            return [sum(of_row) for of_row in zip(*logged.values(), strict=True)]

    @property
    def acts(self) -> int:
        return tiny.acts(ID, self.target, self.trainer) or 0


def scored(module: ModuleType, rows: Sequence[Row], **known: Any) -> tuple[list[float], int]:
    """Return the rewards of these rows, and in how many calls the wrapper acted."""
    scoring = Scoring(module, [text for _, text, _, _ in rows], **known)
    return scoring.rewards([user(end) for end, _, _, _ in rows]), scoring.acts


each_mode = pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
mixed = [*OPEN, *AS_IN_TRL]


@each_mode
@pytest.mark.parametrize("rows", [[row] * 2 for row in OPEN] + [mixed, mixed[::-1]])
def test_an_answer_is_judged_with_the_tag_that_its_prompt_opens(
    module: ModuleType, rows: list[Row], training: bool
) -> None:
    assert scored(module, rows, training=training) == ([right for _, _, _, right in rows], 1)


@each_mode
@pytest.mark.parametrize("rows", [[row] * 2 for row in AS_IN_TRL] + [AS_IN_TRL])
def test_other_answers_are_judged_as_by_trl(module: ModuleType, rows: list[Row], training: bool) -> None:
    assert scored(module, rows, training=training) == ([right for _, _, _, right in rows], 0)


def test_trl_does_not_see_the_tag(module: ModuleType, switch: Any) -> None:
    with switch.off():
        assert scored(module, mixed)[0] == [of_trl for _, _, of_trl, _ in mixed]


def test_a_template_that_is_told_not_to_think_opens_no_tag(module: ModuleType) -> None:
    assert scored(module, OPEN, chat_template_kwargs={"enable_thinking": False}) == ([0.0] * len(OPEN), 0)


def test_a_template_with_other_settings_opens_the_tag(module: ModuleType) -> None:
    assert scored(module, OPEN, chat_template_kwargs={"enable_thinking": True}) == ([1.0] * len(OPEN), 1)


def test_a_rollout_function_renders_its_own_prompts(module: ModuleType) -> None:
    assert scored(module, OPEN, rollout_func=lambda *args: None) == ([0.0] * len(OPEN), 0)


def test_a_trainer_without_rollout_functions_and_template_settings_is_repaired(module: ModuleType) -> None:
    scoring = Scoring(module, [OPEN[0][1]] * 2)
    del scoring.trainer.rollout_func, scoring.trainer.chat_template_kwargs
    if hasattr(scoring.trainer, "chat_template_kwargs"):
        scoring.trainer.chat_template_kwargs = None
    assert scoring.rewards([user("<think>")] * 2) == [1.0, 1.0]


def test_a_completion_that_goes_on_with_a_message_of_the_prompt_has_no_tag(module: ModuleType) -> None:
    """Up to 0.25 the message is off the prompt when the completion is judged."""
    scoring = Scoring(module, ["a</think>b"] * 2)
    prompt = user("<think>")
    if scoring.method == "_generate_and_score_completions":
        prompt = [*prompt, {"role": "assistant", "content": "Well: "}]
    assert scoring.rewards([list(prompt) for _ in range(2)], ["Well: a</think>b"] * 2) == [0.0, 0.0]
    assert scoring.acts == 0


def test_a_prompt_that_ends_with_the_assistant_is_left_as_it_is(module: ModuleType) -> None:
    scoring = Scoring(module, ["a</think>b"] * 2)
    if scoring.method == "_generate_and_score_completions":
        pytest.skip("this release takes the message off the prompt")
    prompt = [*user("a"), {"role": "assistant", "content": "<think>"}]
    assert scoring.rewards([prompt] * 2) == [0.0, 0.0]
    assert scoring.acts == 0


def test_a_completion_of_several_turns_is_judged_by_its_first(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def recording(completions: Any, **kwargs: Any) -> list[float | None]:
        given.extend(completions)
        return think_format_reward(completions, **kwargs)

    monkeypatch.setattr(trl.rewards, "think_format_reward", recording)
    scoring = Scoring(module, ["a</think>b tool: c d"] * 2, [recording])
    if scoring.method == "_generate_and_score_completions":
        pytest.skip("this release has no tools")
    later = [{"role": "tool", "content": "c"}, {"role": "assistant", "content": "d"}]
    assert scoring.rewards([user("<think>")] * 2, ["a</think>b"] * 2, later) == [1.0, 1.0]
    assert given == [[{"role": "assistant", "content": "<think>a</think>b"}, *later]] * 2


def test_each_call_of_each_trainer_is_judged_so(module: ModuleType) -> None:
    scorings = [Scoring(module, [row[1] for row in mixed]) for _ in range(2)]
    for _ in range(2):
        for scoring in scorings:
            assert scoring.rewards([user(row[0]) for row in mixed]) == [row[3] for row in mixed]
    assert [scoring.acts for scoring in scorings] == [2, 2]


def test_other_functions_are_given_what_was_generated(module: ModuleType) -> None:
    given: list[Any] = []

    def other(completions: Any, **kwargs: Any) -> list[float]:
        given.extend(completions)
        return [0.25] * len(completions)

    functions = [other, think_format_reward, other, think_format_reward]
    scoring = Scoring(module, ["a</think>b"] * 2, functions)
    assert scoring.rewards([user("<think>")] * 2) == [2.5, 2.5]
    assert [completion[0]["content"] for completion in given] == ["a</think>b"] * 4
    assert scoring.trainer.reward_funcs is functions


def test_runs_without_the_function_are_left_as_they_are(module: ModuleType) -> None:
    def other(completions: Any, **kwargs: Any) -> list[float]:
        assert scoring.trainer.reward_funcs is functions
        return [0.25] * len(completions)

    functions = [other]
    scoring = Scoring(module, ["a</think>b"] * 2, functions)
    assert scoring.rewards([user("<think>")] * 2) == [0.25, 0.25]
    assert scoring.acts == 0


def test_the_function_is_given_all_else_as_it_is(
    module: ModuleType, switch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[dict[str, Any]] = []

    def recording(**kwargs: Any) -> list[float | None]:
        given.append(kwargs)
        return [0.5] * len(kwargs["completions"])

    monkeypatch.setattr(trl.rewards, "think_format_reward", recording)
    prompts = [user("<think>"), user("")]
    scoring = Scoring(module, ["a</think>b"] * 2, [recording])
    assert scoring.rewards(prompts) == [0.5, 0.5]
    with switch.off():
        scoring.rewards(prompts)
        of_trl = given[-1]
    arguments = given[0]
    assert arguments.keys() == of_trl.keys()
    contents = [[message["content"] for message in completion] for completion in arguments["completions"]]
    assert contents == [["<think>a</think>b"], ["a</think>b"]]
    assert all(completion[0]["role"] == "assistant" for completion in arguments["completions"])
    assert arguments["prompts"] == prompts
    assert [list(ids)[:1] for ids in arguments["completion_ids"]] == [[FIRST], [FIRST + 1]]


def test_the_functions_are_in_place_again_after_an_error(module: ModuleType) -> None:
    def failing(**kwargs: Any) -> list[float]:
        raise ZeroDivisionError

    functions = [think_format_reward, failing]
    scoring = Scoring(module, ["a</think>b"] * 2, functions)
    with pytest.raises(ZeroDivisionError):
        scoring.rewards([user("<think>")] * 2)
    assert scoring.trainer.reward_funcs is functions
