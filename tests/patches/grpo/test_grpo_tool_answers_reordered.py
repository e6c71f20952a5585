"""The answers of a turn are in the order of its calls. What TRL answers in that order, it gathers as before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.testing import answered, has_tools_of_rows, running_loop, stub_with_tools, trainer_and_config

import tiny

ID = "grpo-tool-answers-reordered"
MODULES = {"GRPO": "trl.trainer.grpo_trainer", "DPPO": "trl.experimental.dppo.dppo_trainer"}
ERROR = {"type": "other", "name": "strange"}
"""A call of a type that TRL does not know."""


class Tools:
    """A synchronous tool, ``sync``, and two asynchronous ones, which note what happens when."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.others_have_begun: Any = None

    def all(self) -> list[Any]:
        def sync() -> str:
            self.events.append("sync")
            return "s"

        async def one() -> str:
            self.events.append("one begins")
            await asyncio.sleep(0)
            self.events.append("one ends")
            return "1"

        async def two() -> list[Any]:
            self.events.append("two begins")
            await asyncio.sleep(0)
            self.events.append("two ends")
            return [2]

        async def fails() -> None:
            raise ValueError("no")

        def fails_too() -> None:
            raise ValueError("never")

        return [sync, one, two, fails, fails_too]


@pytest.fixture(params=MODULES)
def classes(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    try:
        return trainer_and_config(import_module(MODULES[request.param]), request.param)
    except ImportError:
        pytest.skip(f"this release has no {request.param}")


@pytest.fixture
def loop() -> Iterator[Any]:
    with running_loop() as running:
        yield running


class Case:
    def __init__(self, classes: tuple[Any, Any], loop: Any, rows: int = 1, **attributes: Any) -> None:
        self.tools = Tools()
        # 1.0 and 1.1 look for images in what a loop without calls returns.
        attributes = {"_is_vlm": False, "_vision_token_ids_cache": None, **attributes}
        self.trainer = stub_with_tools(*classes, self.tools.all(), rows=rows, async_loop=loop, **attributes)
        self.target = f"{classes[0].__module__}:{classes[0].__name__}._tool_call_loop"

    def __call__(self, *turns: Any) -> list[list[Any]]:
        return answered(self.trainer, turns)

    @property
    def events(self) -> list[str]:
        return self.tools.events


ONE_BY_ONE = ["one begins", "one ends"]


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        (("one", "sync"), ["1", "s"]),
        (("one", "sync", "one"), ["1", "s", "1"]),
        (("sync", "one", "sync", "one"), ["s", "1", "s", "1"]),
        (("fails", "sync"), ["{'error': 'no'}", "s"]),
        (("one", "fails_too"), ["1", "{'error': 'never'}"]),
        (("one", ERROR), ["1", "{'error': 'Unsupported tool call type: other'}"]),
    ],
    ids=str,
)
def test_answers_are_in_the_order_of_the_calls(classes: Any, loop: Any, turn: Any, answers: list[str]) -> None:
    assert Case(classes, loop)(turn) == [answers]


def test_an_answer_that_is_a_list_comes_in_its_place(classes: Any, loop: Any) -> None:
    ((first, second),) = Case(classes, loop)(("two", "sync"))
    assert first in ([2], "[2]")  # Up to 1.0 every answer becomes a text.
    assert second == "s"


def test_trl_answers_synchronous_tools_first(classes: Any, loop: Any, switch: Any) -> None:
    case = Case(classes, loop)
    with switch.off():
        assert case(("one", "sync")) == [["s", "1"]]


def test_an_unknown_tool_is_answered_in_its_place(classes: Any, loop: Any, switch: Any) -> None:
    (answers,) = Case(classes, loop)(("one", "unknown", "sync"))
    with switch.off():
        (theirs,) = Case(classes, loop)(("one", "unknown", "sync"))
    # 0.28 does not answer it.
    assert answers == ["1", *theirs[:-2], "s"]


def test_a_call_without_its_arguments_is_answered_in_its_place(classes: Any, loop: Any) -> None:
    wrong = {"type": "function", "function": {"name": "two", "arguments": {"other": 1}}}
    ((first, error, last),) = Case(classes, loop)(("one", wrong, "sync"))
    assert (first, last) == ("1", "s")
    assert "unexpected keyword" in error


def test_arguments_reach_an_asynchronous_tool(classes: Any, loop: Any) -> None:
    async def repeat(text: str) -> str:
        return text

    trainer = stub_with_tools(classes[0], classes[1], [repeat, *Tools().all()], rows=1, async_loop=loop)
    call = {"type": "function", "function": {"name": "repeat", "arguments": {"text": "x"}}}
    assert answered(trainer, [(call, "sync")]) == [["x", "s"]]


def test_an_asynchronous_tool_ends_before_the_next_call(classes: Any, loop: Any) -> None:
    case = Case(classes, loop)
    case(("one", "sync", "two"))
    assert case.events == [*ONE_BY_ONE, "sync", "two begins", "two ends"]


@pytest.mark.parametrize(
    ("turn", "answers"),
    [
        (("one", "one"), ["1", "1"]),
        (("sync", "one"), ["s", "1"]),
        (("sync", "sync"), ["s", "s"]),
        ((ERROR, "one"), ["{'error': 'Unsupported tool call type: other'}", "1"]),
        ((), []),
    ],
    ids=str,
)
def test_a_turn_in_order_is_left_to_trl(classes: Any, loop: Any, turn: Any, answers: list[str]) -> None:
    assert Case(classes, loop)(turn) == [answers]


def test_asynchronous_tools_run_side_by_side_in_a_turn_in_order(classes: Any, loop: Any) -> None:
    case = Case(classes, loop)
    case(("sync", "one", "two"))
    assert case.events == ["sync", "one begins", "two begins", "one ends", "two ends"]


def test_each_completion_has_its_own_turn(classes: Any, loop: Any) -> None:
    case = Case(classes, loop, rows=3)
    assert case(("one", "sync"), ("one", "one"), ("one", "sync", "one")) == [["1", "s"], ["1", "1"], ["1", "s", "1"]]
    if has_tools_of_rows(classes[0]):
        assert case.events[3:7] == ["one begins", "one begins", "one ends", "one ends"]


def test_each_completion_has_its_own_tools(classes: Any, loop: Any) -> None:
    if not has_tools_of_rows(classes[0]):
        pytest.skip("all completions have the same tools in this release")

    async def sync() -> str:
        return "a"

    def one() -> str:
        return "b"

    case = Case(classes, loop, rows=3)
    case.trainer._sync_tool_dicts[1:] = [{"one": one}, {}]
    case.trainer._async_tool_dicts[1:] = [{"sync": sync}, {"sync": sync}]
    assert case(("one", "sync"), ("sync", "one")) == [["1", "s"], ["a", "b"]]


def test_a_name_of_both_kinds_is_the_synchronous_tool(classes: Any, loop: Any) -> None:
    async def sync() -> str:
        return "a"

    case = Case(classes, loop)
    name = "_async_tool_dicts" if has_tools_of_rows(classes[0]) else "_async_tool_dict"
    tools = getattr(case.trainer, name)
    (tools[0] if isinstance(tools, list) else tools)["sync"] = sync
    assert case(("one", "sync", "one")) == [["1", "s", "1"]]
    assert case(("sync", "one")) == [["s", "1"]]


def test_the_trainer_has_its_tools_again_after_it(classes: Any, loop: Any) -> None:
    case = Case(classes, loop)
    before = dict(vars(case.trainer))
    for _ in range(2):
        assert case(("one", "sync")) == [["1", "s"]]
    assert {name: value for name, value in vars(case.trainer).items() if value is not before[name]} == {}


class WholeLoop:
    """What GRPO's loop makes of these turns of one completion."""

    def __init__(self, loop: Any, monkeypatch: Any, *turns: Any) -> None:
        module = import_module(MODULES["GRPO"])
        classes = trainer_and_config(module, "GRPO")
        if not hasattr(classes[0], "_get_tool_suffix_ids"):
            pytest.skip("the loop of this release takes more than a stub has")
        case = Case(
            classes,
            loop,
            max_tool_calling_iterations=len(turns),
            model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=64)),
            use_vllm=False,
            environment_factories=None,
            environments=None,
            _is_vlm=False,
            _tokenizer=None,
            _generate_single_turn=lambda prompts, *args, **kwargs: ([[5] for _ in prompts], None),
            _get_tool_suffix_ids=lambda messages: [9] * len(messages),
        )
        messages = iter([turn_of(turn) for turn in turns[1:]] + [turn_of(())])
        monkeypatch.setattr(module, "parse_response", lambda *args, **kwargs: next(messages))
        result = case.trainer._tool_call_loop([[]], [[3]], [[4]], [[turn_of(turns[0])]], None, None, {})
        (completion,) = result[1]
        self.answers = [message["content"] for message in completion if message["role"] == "tool"]
        self.calls, self.failures = result[4:6]
        self.acts = tiny.acts(ID, case.target, case.trainer)


def turn_of(names: Any) -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": name, "arguments": {}}} for name in names]
    return {"role": "assistant", "content": ""} | ({"tool_calls": calls} if calls else {})


def test_a_later_turn_is_answered_in_order_too(loop: Any, monkeypatch: Any) -> None:
    whole = WholeLoop(loop, monkeypatch, ("sync", "one"), ("one", "sync"), ("one", "sync", "one"))
    assert whole.answers == ["s", "1", "1", "s", "1", "s", "1"]
    assert whole.acts == 1


def test_failures_are_counted(loop: Any, monkeypatch: Any) -> None:
    whole = WholeLoop(loop, monkeypatch, ("one", "fails", "sync", "fails_too"))
    assert (whole.calls, whole.failures) == (4, 2)


def test_loops_of_turns_in_order_are_left_alone(loop: Any, monkeypatch: Any) -> None:
    whole = WholeLoop(loop, monkeypatch, ("sync", "one"), ("one", "one"), ("sync",))
    assert whole.answers == ["s", "1", "1", "1", "s"]
    assert whole.acts == 0
