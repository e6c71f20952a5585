"""GRPO puts the answers of synchronous tools before those of asynchronous ones, whatever the order of the calls.

``_tool_call_loop`` runs a synchronous tool as it comes to its call, and gathers the asynchronous ones of a turn behind
all of them. An error (an unknown tool, another type of call) is answered among the synchronous ones. The messages have
no id of their call, so to the model the first answer is the one to its first call.

TRL's loop has nothing that could be sorted before it tokenizes the answers. So in a turn whose answers would be out of
order, the wrapper has the asynchronous tools among the synchronous ones, and they are awaited there, one by one, on the
trainer's loop. Experimental AsyncGRPO awaits its tools like that. Other turns gather as before.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import answered, running_loop, stub_with_tools, trainer_and_config

Tools = dict[str, Callable[..., Any]]


class _InOrder(Tools):
    """The synchronous tools, and in a turn whose answers would be out of order the asynchronous ones."""

    def __init__(
        self, tools: Tools, asynchronous: Tools, completions: Sequence[Any], awaited: Callable[..., Any]
    ) -> None:
        super().__init__(tools)
        self._asynchronous, self._completions, self._awaited = asynchronous, completions, awaited

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (name in self._asynchronous and self._is_out_of_order())

    def __missing__(self, name: str) -> Callable[..., Any]:
        return lambda **arguments: self._awaited(self._asynchronous[name](**arguments))

    def _is_out_of_order(self) -> bool:
        # A completion ends with the message that calls the tools until TRL has the answers to all of its calls.
        turns = (completion[-1].get("tool_calls") or () for completion in self._completions)
        return any(kinds != sorted(kinds) for kinds in ([self._is_gathered(call) for call in turn] for turn in turns))

    def _is_gathered(self, call: Any) -> bool:
        name = call["function"]["name"] if call["type"] == "function" else None
        return name in self._asynchronous and not super().__contains__(name)


@wrapper
def answer_in_the_order_of_the_calls(call: Call) -> Any:
    """Hand TRL the asynchronous tools as synchronous ones, where it would answer in another order."""
    trainer, completions, act = call.trainer, call["completions"], call.act_later()

    def awaited(coroutine: Any) -> Any:
        act()
        return asyncio.run_coroutine_threadsafe(coroutine, trainer.async_loop).result()

    with ExitStack() as stack:
        if hasattr(trainer, "_async_tool_dict"):  # 0.28 has the same tools for all completions.
            tools: Any = _InOrder(trainer._sync_tool_dict, trainer._async_tool_dict, completions, awaited)
            stack.enter_context(shadowed(trainer, "_sync_tool_dict", tools))
        else:
            # There may be more than completions.
            each = zip(trainer._sync_tool_dicts, trainer._async_tool_dicts, completions, strict=False)
            tools = [_InOrder(tools, others, [completion], awaited) for tools, others, completion in each]
            stack.enter_context(shadowed(trainer, "_sync_tool_dicts", tools))
        return call()


def answers_are_in_the_order_of_the_calls(module: ModuleType) -> Outcome:
    """Call an asynchronous tool that answers 1, then a synchronous one that answers 2."""
    trainer_class, config_class = trainer_and_config(module, "DPPO", "GRPO")
    loop_of_calls = inspect.unwrap(getattr(trainer_class, "_tool_call_loop", len))
    if "async_coros" not in getattr(getattr(loop_of_calls, "__code__", None), "co_varnames", ()):
        return absent("GRPO of this release has no asynchronous tools")

    async def first() -> int:
        return 1

    def second() -> int:
        return 2

    with running_loop() as loop:
        trainer = stub_with_tools(trainer_class, config_class, [first, second], rows=1, async_loop=loop)
        (answers,) = answered(trainer, [["first", "second"]])
    return judge(int("".join(answers)), right=12, wrong=21)
