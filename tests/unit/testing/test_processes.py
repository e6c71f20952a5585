from __future__ import annotations

import logging
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trl_hotfix.log import event, warning
from trl_hotfix.testing import recorded_warnings, single_process, stream


def of_accelerate(name: str) -> Any:
    def collective(*args: Any, **kwargs: Any) -> str:
        return f"{name} waits for the other ranks"

    collective.__module__ = "accelerate.utils.operations"
    return collective


@pytest.fixture
def module() -> ModuleType:
    """A module as TRL's trainers are: with names of accelerate's, and one function of its own."""
    made_up = ModuleType("trl.trainer.made_up")
    for name in ("gather", "gather_object", "broadcast", "broadcast_object_list"):
        setattr(made_up, name, of_accelerate(name))
    made_up.PartialState = of_accelerate("PartialState")  # type: ignore[attr-defined]
    made_up.logger = SimpleNamespace(warning=of_accelerate("logger"))  # type: ignore[attr-defined]
    return made_up


def test_a_collective_returns_its_argument(module: Any) -> None:
    rewards = [1.0, 2.0]
    with single_process(module):
        assert module.gather(rewards) is rewards
        assert module.gather_object(object=rewards) is rewards
        assert module.broadcast(rewards, 0) is rewards
        assert module.broadcast_object_list(from_process=0, object_list=rewards) is rewards
        with module.PartialState().main_process_first(), module.PartialState().local_main_process_first():
            assert module.logger.warning("is not shown") is None


def test_afterwards_the_module_is_as_it_was(module: ModuleType) -> None:
    before = vars(module).copy()
    with pytest.raises(ZeroDivisionError), single_process(module):
        raise ZeroDivisionError
    assert vars(module) == before


def test_a_module_without_these_names_gets_none() -> None:
    module = ModuleType("trl.trainer.made_up")
    before = set(vars(module))
    with single_process(module):
        assert set(vars(module)) == before


def test_other_threads_go_on_with_all_their_ranks(module: Any) -> None:
    answers: list[Any] = []

    def gather() -> None:
        answers.append(module.gather([1.0]))

    with single_process(module):
        thread = threading.Thread(target=gather)
        thread.start()
        thread.join()
    assert answers == ["gather waits for the other ranks"]


def test_the_warnings_of_this_thread_are_recorded_and_those_of_others_are_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    logger = logging.getLogger("trl_hotfix")
    with caplog.at_level("WARNING"), recorded_warnings() as messages:
        logger.warning("of %s", "this thread")
        thread = threading.Thread(target=logger.warning, args=("of %s", "another"))
        thread.start()
        thread.join()
    assert messages == ["of this thread"]
    assert caplog.messages == ["of another"]


def test_what_the_engine_warns_of_meanwhile_is_logged_with_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING"), recorded_warnings() as messages:
        warning("%s stays off", "another patch", extra=event("switched-off"))
    assert messages == []
    assert caplog.messages == ["another patch stays off"]


def test_an_unrelated_function_of_the_name_stays(module: Any) -> None:
    module.gather = lambda logits, index: (logits, index)
    with single_process(module):
        assert module.gather(1, 2) == (1, 2)


def test_a_nested_block_is_for_its_own_thread(module: Any) -> None:
    answers: list[Any] = []

    def within() -> None:
        with single_process(module):
            answers.append(module.gather("local"))

    with single_process(module):
        thread = threading.Thread(target=within)
        thread.start()
        thread.join()
        assert module.gather("outer") == "outer"
    assert answers == ["local"]


def test_a_stream_is_mapped_like_a_dataset() -> None:
    pytest.importorskip("datasets")
    rows = stream([{"text": "a"}, {"text": "b"}])
    assert (rows.column_names, rows[1]) == (["text"], {"text": "b"})
    # datasets 2.21 lets a mapped stream be read once.
    mapped = rows.map(lambda row: {"length": len(row["text"])}, num_proc=2, desc="Counting")
    assert list(mapped) == [{"text": "a", "length": 1}, {"text": "b", "length": 1}]
    second = rows.map(lambda row: {"length": len(row["text"])})
    assert second.column_names == ["text", "length"]
