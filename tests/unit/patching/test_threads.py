"""Methods are called, and patches applied and reverted, by several threads at once."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.import_hooks import FINDER
from trl_hotfix.model import Outcome, State, Target, Verdict
from trl_hotfix.patching import engine
from trl_hotfix.patching.sites import Site, Sites
from trl_hotfix.patching.wrappers import Layer

RUNS = 200


def outer(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    first = wrapped(*args, **kwargs)
    return ("new", first, wrapped(*args, **kwargs))


def is_on(module: ModuleType) -> Outcome:
    answer = object.__new__(module.DPOTrainer).dpo_loss("x")
    return Outcome(Verdict.FIXED if answer[0] == "new" else Verdict.REPRODUCED)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace ``dpo_loss`` by a method without side effects that counts as a method of TRL."""
    import trl.trainer.dpo_trainer as leaf

    namespace: dict[str, Any] = {}
    code = "def dpo_loss(self, said):\n    return ('old', said)\n"
    exec(compile(code, leaf.__file__, "exec"), vars(leaf), namespace)
    monkeypatch.setattr(DPOTrainer, "dpo_loss", namespace["dpo_loss"])
    from trl_hotfix.matching import digests
    from trl_hotfix.patching import conflicts

    # A search through all objects of the process takes longer with each test that has run before.
    monkeypatch.setattr(conflicts, "objects_of", lambda sites: [])
    monkeypatch.setattr(digests, "loaded", lambda function: digests.Loaded("c1:0", from_file=True))


def together(*jobs: Callable[[], None]) -> list[BaseException]:
    """Run the jobs concurrently to their end, and return what they raised."""
    raised: list[BaseException] = []

    def run(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(job,), daemon=True) for job in jobs]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    finally:
        sys.setswitchinterval(before)
    assert not any(thread.is_alive() for thread in threads), "a deadlock"
    return raised


def test_a_concurrent_call_is_fully_patched_or_unpatched(declare: Any, target: None) -> None:
    declare(is_on, outer)
    trainer = object.__new__(DPOTrainer)
    over = threading.Event()
    answers: set[Any] = set()

    def calls() -> None:
        while not over.is_set():
            answers.add(trainer.dpo_loss("x"))

    def switches() -> None:
        try:
            for _ in range(RUNS):
                assert trl_hotfix.apply()["made-up"].state is State.APPLIED
                trl_hotfix.revert()
        finally:
            over.set()

    assert together(switches, calls, calls, calls) == []
    assert answers == {("old", "x"), ("new", ("old", "x"), ("old", "x"))}


def test_concurrent_apply_and_revert_end_unpatched(declare: Any, target: None) -> None:
    declare(is_on, outer)
    declare(is_on, outer, id="another")
    before = vars(DPOTrainer)["dpo_loss"]

    def often(*actions: Callable[[], Any]) -> Callable[[], None]:
        def run() -> None:
            for _ in range(RUNS // 4):
                for action in actions:
                    action()

        return run

    def only_one() -> None:
        trl_hotfix.apply(only=["another"])

    jobs = [often(trl_hotfix.apply, trl_hotfix.revert), often(only_one, trl_hotfix.status), often(trl_hotfix.revert)]
    assert together(*jobs, often(trl_hotfix.status)) == []
    # Both have the same wrapper, so the second does not reproduce what the first has repaired.
    assert {action.state for action in trl_hotfix.apply()} == {State.APPLIED, State.SKIPPED}
    trl_hotfix.revert()
    assert vars(DPOTrainer)["dpo_loss"] is before


def test_a_site_that_another_thread_looks_up_meanwhile_is_taken_off() -> None:
    """Between the new attribute and the site's record of it, the wrapper would be taken for TRL's own function."""
    looked_up: list[Site] = []
    module, sites, at = ModuleType("trl.made_up"), Sites(), Target("trl.made_up", "Trainer.step", "wrapper")
    looks = threading.Thread(target=lambda: looked_up.append(sites.at(module, at)), daemon=True)

    class Watched(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if not looks.ident:
                looks.start()
                looks.join(0.5)

    class Trainer(metaclass=Watched):
        def step(self) -> str:
            return "old"

    module.Trainer = Trainer  # type: ignore[attr-defined]
    site = sites.at(module, at)
    site.put_on(Layer("a-patch", 1, lambda wrapped, *_: f"new {wrapped()}", traced=False))
    looks.join(60)
    assert looked_up == [site]
    assert Trainer().step() == "new old"
    site.take_off("a-patch")
    assert Trainer().step() == "old"


def test_a_patch_reverted_during_an_import_is_off(declare: Any, target: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that is applied again during the import is on when the import ends."""
    import trl.trainer.dpo_trainer as leaf

    for reapplied in (False, True):
        at_work, go_on = threading.Event(), threading.Event()

        def waits(module: ModuleType, at_work: threading.Event = at_work, go_on: threading.Event = go_on) -> Outcome:
            at_work.set()
            assert go_on.wait(60)
            return is_on(module)

        patch = declare(waits, outer, id=f"made-up-{reapplied}".lower())
        monkeypatch.delitem(sys.modules, leaf.__name__)
        assert trl_hotfix.apply(only=[patch.id])[patch.id].state is State.PENDING
        monkeypatch.setitem(sys.modules, leaf.__name__, leaf)
        importing = threading.Thread(target=FINDER._notify, args=(leaf.__name__, leaf), daemon=True)
        importing.start()
        assert at_work.wait(60)
        assert trl_hotfix.revert()[patch.id].state is State.REVERTED
        if reapplied:
            assert trl_hotfix.apply(only=[patch.id])[patch.id].state is State.PENDING
        go_on.set()
        importing.join(60)
        assert not importing.is_alive()
        version = object.__new__(DPOTrainer).dpo_loss("x")[0]
        assert (version, trl_hotfix.status()[patch.id].state) == (
            ("new", State.APPLIED) if reapplied else ("old", State.REVERTED)
        )
        trl_hotfix.revert()
        assert object.__new__(DPOTrainer).dpo_loss("x")[0] == "old"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.parametrize("step", ["red", "green"])
def test_a_child_of_a_process_in_which_a_thread_applies_can_apply_too(declare: Any, target: None, step: str) -> None:
    at_work, go_on, parent = threading.Event(), threading.Event(), os.getpid()

    def waits(module: ModuleType) -> Outcome:
        outcome = is_on(module)
        if os.getpid() == parent and outcome.verdict is (Verdict.FIXED if step == "green" else Verdict.REPRODUCED):
            at_work.set()
            assert go_on.wait(120)
        return outcome

    def child() -> int:
        off = object.__new__(DPOTrainer).dpo_loss("x") == ("old", "x")
        applied = trl_hotfix.apply()["made-up"].state is State.APPLIED
        on = object.__new__(DPOTrainer).dpo_loss("x")[0] == "new"
        reverted = trl_hotfix.revert()["made-up"].state is State.REVERTED
        return 0 if off and applied and on and reverted else 1

    declare(waits, outer)
    applying = threading.Thread(target=trl_hotfix.apply, daemon=True)
    applying.start()
    try:
        assert at_work.wait(60)
        pid = os.fork()
        if not pid:
            signal.alarm(60)  # It ends a child that hangs.
            code = 2
            try:
                code = child()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    finally:
        go_on.set()
        applying.join(60)
    assert trl_hotfix.status()["made-up"].state is State.APPLIED


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_child_keeps_what_its_own_thread_was_working_on(declare: Any, target: None) -> None:
    codes = []

    def forks(module: ModuleType) -> Outcome:
        busy, waits, pid = [False], False, os.fork()
        if pid:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            return is_on(module)
        signal.alarm(60)
        try:
            registry = engine.ENGINE._registry
            busy = [registry.is_busy(module_patch) for module_patch in registry.all()]
            waits = trl_hotfix.status()["made-up"].state is State.PENDING
        finally:
            os._exit(0 if busy == [True] and waits else 1)

    declare(forks, outer)
    assert trl_hotfix.apply()["made-up"].state is State.APPLIED
    assert codes == [0, 0]


def test_imports_in_threads_call_every_callback(tmp_path: Any) -> None:
    sys.path.insert(0, str(tmp_path))
    package = tmp_path / "trl_threads"
    package.mkdir()
    (package / "__init__.py").write_text("")
    names = [f"trl_threads.leaf{index}" for index in range(RUNS)]
    for name in names:
        (package / f"{name.split('.')[1]}.py").write_text("done = True\n")
    importlib.invalidate_caches()
    called: list[str] = []

    def arms() -> None:
        for name in names:
            FINDER.when_imported(name, lambda module: called.append(module.__name__))

    def imports(order: list[str]) -> Callable[[], None]:
        def run() -> None:
            for name in order:
                assert importlib.import_module(name).done

        return run

    try:
        assert together(arms, imports(names), imports(names[::-1])) == []
        # A module that was looked up but not yet executing when its callback was registered: asking again calls it.
        for name in set(names) - set(called):
            FINDER.when_imported(name, lambda module: called.append(module.__name__))
        assert set(called) == set(names)
    finally:
        for name in names:
            FINDER.forget(name)
            sys.modules.pop(name, None)
        with suppress(ValueError):
            sys.path.remove(str(tmp_path))
