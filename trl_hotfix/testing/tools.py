"""Tools that a model calls: an event loop for the asynchronous ones, and GRPO's loop of calls up to their answers."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import Thread
from types import SimpleNamespace
from typing import Any

from .trainers import StopConstruction, default_arguments, stub_trainer


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread of its own, as TRL's trainers do for asynchronous tools."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def stub_with_tools(
    trainer_class: Any, config_class: Any, tools: Sequence[Callable[..., Any]], rows: int, **attributes: Any
) -> Any:
    """Return a stub of GRPO or DPPO for ``answered``. Each of its rows has these tools."""
    kinds: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for tool in tools:
        kinds[inspect.iscoroutinefunction(tool)][tool.__name__] = tool
    if has_tools_of_rows(trainer_class):
        by_kind: dict[str, Any] = {"_sync_tool_dicts": [kinds[0]] * rows, "_async_tool_dicts": [kinds[1]] * rows}
    else:
        by_kind = {"_sync_tool_dict": kinds[0], "_async_tool_dict": kinds[1]}
    known: dict[str, Any] = {"max_tool_calling_iterations": 1, "divergence_topk": 0, "tools": list(tools)}
    known |= {"chat_template": None, "chat_template_kwargs": {}, "_get_tool_suffix_ids": _stop}
    return stub_trainer(
        trainer_class,
        default_arguments(config_class),
        processing_class=SimpleNamespace(apply_chat_template=_stop),
        **{**known, **by_kind, **attributes},
    )


def has_tools_of_rows(trainer_class: Any) -> bool:
    """Return whether each completion has tools of its own, which 0.29.0 brought."""
    return "_sync_tool_dicts" in inspect.unwrap(trainer_class._tool_call_loop).__code__.co_names


def answered(trainer: Any, turns: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Return the answers that TRL's loop gives to the first turn of each completion, up to where it tokenizes them.

    A call of a turn is the name of a tool, or what stands in the message in its place.
    """
    completions = [[{"role": "assistant", "content": "", "tool_calls": [*map(_call, turn)]}] for turn in turns]
    given: dict[str, Any] = {name: [[3] for _ in turns] for name in ("prompt_ids", "completion_ids")}
    given |= {"prompts": [[{"role": "user", "content": ""}] for _ in turns], "completions": completions}
    names = inspect.signature(trainer._tool_call_loop).parameters
    with suppress(StopConstruction):
        trainer._tool_call_loop(**{name: given.get(name) for name in names})
    answers = [[message["content"] for message in completion[1:]] for completion in completions]
    prompted = [[message["content"] for message in prompt[2:]] for prompt in given["prompts"]]
    assert prompted == answers, (prompted, answers)
    return answers


def _call(call: Any) -> Any:
    if not isinstance(call, str):
        return call
    return {"type": "function", "function": {"name": call, "arguments": {}}}


def _stop(*args: Any, **kwargs: Any) -> Any:
    raise StopConstruction
