"""What a self-test must not wait for or leave behind: other ranks, logged lines, cached datasets, progress bars."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

from ..authoring import shadowed


def _state() -> SimpleNamespace:
    return SimpleNamespace(main_process_first=nullcontext, local_main_process_first=nullcontext)


def _gather(tensor: Any) -> Any:
    return tensor


def _gather_object(object: Any) -> Any:
    return object


def _broadcast(tensor: Any, from_process: int = 0) -> Any:
    return tensor


def _broadcast_object_list(object_list: Any, from_process: int = 0) -> Any:
    return object_list


_PROCESS_STATE: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {"PartialState": _state, "global_then_local_main_first": lambda *args, **kwargs: nullcontext()}
)
"""What TRL's modules ask about the processes of a run, and the answer where there is one process."""

_COLLECTIVES: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "gather": _gather,
        "gather_object": _gather_object,
        "broadcast": _broadcast,
        "broadcast_object_list": _broadcast_object_list,
    }
)
"""The functions of ``accelerate.utils`` that TRL's modules import by name, and what each is with one process.

The trainers of GRPO and RLOO call all but ``broadcast``; RLOO up to 0.21 and PPO call ``broadcast``; online DPO, GOLD,
distillation, reward modelling and the callbacks call ``gather_object`` or ``broadcast_object_list``.
"""


@contextmanager
def single_process(module: ModuleType) -> Iterator[None]:
    """Silence this TRL module's logger inside the block, and give the calling thread a run of one process.

    A self-test does not wait for the ranks of a run: neither for the main process to go first, nor in a collective
    operation. accelerate's loggers would ask for the rank too. Other threads go on as before.
    """
    thread = threading.get_ident()

    def in_this_thread(substitute: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
        # wraps: it remains accelerate's by its __module__, also for a block within this one.
        @functools.wraps(original, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            return (substitute if threading.get_ident() == thread else original)(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name, substitute in {**_PROCESS_STATE, **_COLLECTIVES}.items():
            original = getattr(module, name, None)
            if original is None or (name in _COLLECTIVES and not _is_accelerates(original)):
                continue
            stack.enter_context(shadowed(module, name, in_this_thread(substitute, original)))
        if hasattr(module, "logger"):
            quiet = dict.fromkeys(("info", "warning", "warning_once"), lambda *args, **kwargs: None)
            stack.enter_context(shadowed(module, "logger", SimpleNamespace(**quiet)))
        yield


@contextmanager
def recorded_warnings() -> Iterator[list[str]]:
    """Give a list of what this thread warns of as ``trl_hotfix`` inside the block. The log has nothing of it.

    The trainers of a self-test are no user's. Other threads go on as before.
    """
    logger, thread, messages = logging.getLogger("trl_hotfix"), threading.get_ident(), list[str]()
    warn = logger.warning

    def record(message: str, *args: Any) -> None:
        if threading.get_ident() == thread:
            messages.append(message % args)
        else:
            warn(message, *args)

    with shadowed(logger, "warning", record):
        yield messages


def _is_accelerates(function: Any) -> bool:
    """Return whether this is accelerate's function, and not another one of the same name."""
    return str(getattr(function, "__module__", None)).partition(".")[0] == "accelerate"


def stream(rows: list[dict[str, Any]]) -> Any:
    """Return ``rows`` as an ``IterableDataset``, which is mapped without a hash, a cache or a progress bar.

    It always has its column names and its first row, which 0.15 needs after a map, and takes the arguments of
    ``Dataset.map``.
    """
    from datasets import Dataset, IterableDataset

    class Rows(IterableDataset):  # type: ignore[misc]
        column_names = property(lambda self: list(next(iter(self))))

        def __getitem__(self, index: int) -> Any:
            return list(self)[index]

        def map(self, *args: Any, **kwargs: Any) -> Any:
            only_for_a_dataset = {"num_proc", "desc", "writer_batch_size"}
            mapped = super().map(*args, **{key: kwargs[key] for key in kwargs if key not in only_for_a_dataset})
            mapped.__class__ = Rows
            return mapped

    dataset = Dataset.from_list(rows).to_iterable_dataset()
    dataset.__class__ = Rows
    return dataset
