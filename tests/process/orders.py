"""Runs orders of events, each in a process of its own, and says what is to be seen after each event.

``python orders.py CASES ANSWERS forked`` imports whatever TRL imports, but not TRL, and forks for every case: a process
that imports TRL from nothing takes four seconds. With ``fresh`` the one case runs in this very process, from nothing. A
case is a list of events; an event is one word, or two, ``where:selection``; what each does stands in ``Process``.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import io
import json
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from functools import partial
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

LEAF, UTILS, INNER = "trl.trainer.dpo_trainer", "trl.trainer.utils", "trl.trainer.dpo_config"
"""The leaf; a module with a function that the leaf holds by value; one that only the leaf imports."""

METHODS = {
    "order-methods": ("dpo_loss", "get_batch_logps", "training_step"),
    "moe-aux-loss-lost-under-deepspeed": ("get_batch_loss_metrics",),
    "dpo-eval-reference-from-trained-policy": ("get_train_dataloader",),
}
SELECTIONS: dict[str, dict[str, Any]] = {
    "all": {},
    "only": {"only": ["order-function", "moe-aux-loss-lost-under-deepspeed"]},
    "skip": {"skip": ["moe-aux-loss-lost-under-deepspeed"]},
    "options": {"options": {"order-function": {"voice": "loud"}}},
}
VARIABLES: dict[str, dict[str, str]] = {
    "all": {},
    "only": {"TRL_HOTFIX_ONLY": ",".join(SELECTIONS["only"]["only"])},
    "skip": {"TRL_HOTFIX_SKIP": ",".join(SELECTIONS["skip"]["skip"])},
    "options": {"TRL_HOTFIX_OPTIONS": "order-function.voice=loud"},
}


class Process:
    """One case. Every event is a method; ``seen`` is what stands after it."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.digests: list[str] = []

    # How the trainer comes into the process.

    def leaf(self) -> None:
        importlib.import_module(LEAF)

    def trl(self) -> None:
        importlib.import_module("trl")

    def from_trl(self) -> None:
        exec("from trl import DPOTrainer", {})

    def other(self) -> None:
        exec("from trl import CPOTrainer", {})

    def reload(self) -> None:
        importlib.reload(sys.modules[LEAF])

    def reload_utils(self) -> None:
        importlib.reload(sys.modules[UTILS])

    # What a user does with it.

    def subclass(self) -> None:
        trainer = sys.modules[LEAF].DPOTrainer
        self._keep("subclass", type("Mine", (trainer,), {"dpo_loss": _calls_super}))

    def instance(self) -> None:
        trainer = sys.modules[LEAF].DPOTrainer
        self._keep("instance", object.__new__(trainer))
        self._keep(
            "bound", {name: getattr(object.__new__(trainer), name) for each in METHODS.values() for name in each}
        )

    def by_value(self) -> None:
        self._keep("value", sys.modules[UTILS].pad_to_length)

    def _keep(self, kind: str, thing: Any) -> None:
        self.objects[f"{kind}{sum(key.startswith(kind) for key in self.objects)}"] = thing

    # What is done with the patches.

    def env(self, selection: str) -> None:
        """What the line in the .pth does at interpreter start."""
        from trl_hotfix import autostart

        os.environ |= {"TRL_HOTFIX": "1", **VARIABLES[selection]}
        autostart.start()

    def apply(self, selection: str) -> None:
        import trl_hotfix

        trl_hotfix.apply(**SELECTIONS[selection])

    def revert(self) -> None:
        import trl_hotfix

        trl_hotfix.revert()

    def revert_one(self) -> None:
        import trl_hotfix

        trl_hotfix.revert("order-methods")

    def status(self) -> None:
        import trl_hotfix

        trl_hotfix.status()

    def cli(self) -> None:
        """``--list`` in this very process: it must not move anything. Keeps what digest it speaks of."""
        from trl_hotfix.commands.main import main

        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main(["list", "--json"])
        self.digests.append(json.loads(out.getvalue())["digest"])

    # In the middle of an import.

    def half(self, selection: str) -> None:
        """Applied by what the leaf imports, so that the leaf is in sys.modules and half made."""
        _when_imported(INNER, lambda: self.apply(selection), self.leaf)

    def half_thread(self, selection: str) -> None:
        _when_imported(INNER, lambda: _in_a_thread(lambda: self.apply(selection)), self.leaf)

    def half_reload(self, selection: str) -> None:
        """Applied to the old class while the new one is made: that it has come, is seen when somebody looks."""
        _when_imported(INNER, lambda: self.apply(selection), self.reload)
        self.status()

    def half_revert(self) -> None:
        _when_imported(INNER, self.revert, self.leaf)

    def finder(self, selection: str) -> None:
        """Applied by a finder of somebody else that is asked for the leaf: ours is too late, until somebody looks."""
        _when_imported(LEAF, lambda: self.apply(selection), self.leaf)
        self.status()

    def threads(self, seed: str) -> None:
        """Imports, selections, reverts and looks, each in a thread, at once and from nothing."""
        # Not `from trl import`: TRL's own lazy module loses names when two threads import it first.
        other = partial(importlib.import_module, "trl.trainer.cpo_trainer")
        jobs = [self.leaf, other, self.status, self.revert, *(partial(self.apply, each) for each in SELECTIONS)]
        random.Random(seed).shuffle(jobs)
        raised: list[str] = []
        begin = threading.Barrier(len(jobs))

        def run(job: Callable[[], None]) -> None:
            try:
                begin.wait()
                job()
            except BaseException:  # noqa: BLE001
                raised.append(traceback.format_exc())

        # Ends the process and says where every thread stands.
        faulthandler.dump_traceback_later(120, exit=True)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(0.005)
        faulthandler.cancel_dump_traceback_later()
        assert not raised, raised[0]

    # What is to be seen.

    def seen(self) -> dict[str, Any]:
        leaf, utils = sys.modules.get(LEAF), sys.modules.get(UTILS)
        things = dict(self.objects)
        if leaf is not None:
            things |= {"class": leaf.DPOTrainer, "held": leaf.pad_to_length}
        if utils is not None:
            things["function"] = utils.pad_to_length
        finders = sum(type(each).__module__.startswith("trl_hotfix.") for each in sys.meta_path)
        return {"on": {name: _on(thing) for name, thing in things.items()}, "finders": finders}

    def report(self) -> dict[str, Any]:
        import trl_hotfix

        report = trl_hotfix.status()
        states = {each.id: f"{each.state.value} {each.reason.value}" for each in report}
        return {"digest": report.digest, "states": states, "self_tests": self.self_tests()}

    def self_tests(self) -> dict[str, str]:
        """What the patches' own self-tests find in the leaf: it is the behaviour that counts."""
        if LEAF not in sys.modules:
            return {}
        from trl_hotfix.catalogue import loading
        from trl_hotfix.patching import self_test

        patches = [patch for patch in loading.load() if patch.id in METHODS]
        return {patch.id: self_test.self_test(patch, sys.modules[LEAF], {}).verdict.value for patch in patches}

    def run(self, events: list[str]) -> dict[str, Any]:
        after = []
        for event in events:
            name, _, selection = event.partition(":")
            getattr(self, name)(*filter(None, [selection]))
            after.append(self.seen())
        said = {"after": after, "report": self.report(), "end": self.seen(), "cli": self.digests}
        self.revert()
        return {**said, "reverted": self.seen(), "vars": the_vars()}


def _calls_super(self: Any, *args: Any) -> Any:
    return super(type(self), self).dpo_loss(*args)


def _on(thing: Any) -> Any:
    """Which patches are on this class, instance or collection of bound methods; what a function answers to a mark."""
    if inspect.isroutine(thing):
        return _answer(thing)
    if isinstance(thing, type):
        thing = object.__new__(thing)
    methods = thing if isinstance(thing, dict) else {n: getattr(thing, n) for each in METHODS.values() for n in each}
    found = {}
    for patch, names in METHODS.items():
        answers = {_answer(methods[name]) if patch == "order-methods" else _is_ours(methods[name]) for name in names}
        # On whole or not at all.
        found[patch] = answers.pop() if len(answers) == 1 else "half"
    return sorted(patch for patch, answer in found.items() if answer) if "half" not in found.values() else found


def _answer(function: Callable[..., Any]) -> str | None:
    """What a patched function says to a mark; TRL's own fails on it."""
    try:
        said = function("?")
    except (TypeError, AttributeError):
        return None
    return said if isinstance(said, str) else f"rubbish: {said!r}"


def _is_ours(method: Any) -> bool:
    return type(method).__module__ == "trl_hotfix.patching.wrappers"


def the_vars() -> dict[str, list[str]]:
    """Every name of the modules of trainers that are there and of their classes, in order, and what stands there.

    Of a function, whether it is the one that its file has: by the place of its code.
    """
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("trl.trainer.") and hasattr(module, "__file__"):
            found[name] = [_described(key, value) for key, value in vars(module).items()]
            for key, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    found[f"{name}.{key}"] = [_described(inner, each) for inner, each in vars(value).items()]
    return found


def _described(key: str, value: Any) -> str:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    where = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{key} {type(value).__module__}.{type(value).__qualname__} {where}"


class _Asked:
    """A finder of somebody else: does something once, when it is asked for the leaf, or while what it found runs."""

    def __init__(self, name: str, do: Callable[[], None]) -> None:
        self.name, self.do, self.done = name, do, False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.done:
            return None
        self.done = True
        if name == LEAF:
            self.do()
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not above: the import system holds its one global lock while it asks finders, and not while a module runs.
            self.do()

        spec.loader.exec_module = exec_module
        return spec


def _when_imported(name: str, do: Callable[[], None], then: Callable[[], None]) -> None:
    if name == INNER:
        sys.modules.pop(name, None)  # what has been imported before must be asked for again
    asked = _Asked(name, do)
    sys.meta_path.insert(0, asked)
    try:
        then()
    finally:
        sys.meta_path.remove(asked)
    assert asked.done, f"{name} was not asked for"


def _in_a_thread(do: Callable[[], None]) -> None:
    thread = threading.Thread(target=do, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        faulthandler.dump_traceback()  # of all threads: what each waits for
    assert not thread.is_alive(), "a deadlock: apply() waits for an import that waits for it"


def in_a_fork(work: Callable[[], Any]) -> Any:
    """What ``work`` returns, or ``{"error": traceback}``, from a child of this process."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reads)
        try:
            answer = work()
        except BaseException:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        with os.fdopen(writes, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as pipe:
        text = pipe.read()
    _, ended = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with {ended}"}


def _everything_of_trl() -> list[str]:
    """The modules that a process has when it has imported and tested what is patched; not those of TRL, nor ours."""
    import trl_hotfix

    for name in (LEAF, "trl.trainer.cpo_trainer"):
        importlib.import_module(name)
    trl_hotfix.apply()
    return [name for name in sys.modules if name.partition(".")[0] not in ("trl", "trl_hotfix", "__main__")]


def serve(cases: list[list[str]]) -> list[Any]:
    """Each case in a fork of this process, which has everything imported but TRL."""
    for name in in_a_fork(_everything_of_trl):
        # A module that failed for whoever imported it, or that somebody has put there under a name of its own.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from trl_hotfix.catalogue import loading
    from trl_hotfix.commands import main  # noqa: F401
    from trl_hotfix.matching import fingerprints
    from trl_hotfix.patching import engine, sites  # noqa: F401

    loading.load()
    fingerprints.bodies()
    # What each child would look up anew: the metadata of TRL, dozens of times, and where every module's source is.
    metadata.distribution = functools.cache(metadata.distribution)
    inspect.getmodule(compile("", "nowhere", "exec"))
    assert "trl" not in sys.modules
    gc.collect()
    gc.freeze()  # or the first collection in each child copies the memory of this process
    return [in_a_fork(lambda case=case: Process().run(case)) for case in cases]


def main(cases: str, answers: str, how: str) -> None:
    given = json.loads(Path(cases).read_text(encoding="utf-8"))
    found = serve(given) if how == "forked" else [Process().run(case) for case in given]
    Path(answers).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
