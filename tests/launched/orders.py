"""Run orders of events, each in its own process, and record the patches that are on after each event.

``python orders.py CASES ANSWERS forked`` imports whatever TRL imports, but not TRL, and forks for every case: a process
that imports TRL from nothing takes four seconds. With ``fresh`` the one case runs in this process, from nothing. A case
is a list of events; an event is ``name`` or ``name:selection``, and each name is a method of ``Process``.
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
"""The patched module (leaf); a module with a function that the leaf holds by value; one that only the leaf imports."""

METHODS = {
    "order-methods": ("compute_reference_log_probs", "get_batch_logps", "training_step"),
    "moe-aux-loss-lost-under-deepspeed": ("get_batch_loss_metrics",),
    "dpo-eval-reference-from-trained-policy": ("get_train_dataloader",),
    "dpo-f-divergence-ignored": ("dpo_loss",),
    "eval-mean-of-batch-means": ("prediction_step", "log"),
    "eval-dict-metrics-collide": ("log",),
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
    """One case. Every event is a method; ``seen`` returns the patches that are on after it."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self.digests: list[str] = []

    # Imports of the trainer.

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

    # Objects that a user makes of it.

    def subclass(self) -> None:
        trainer = sys.modules[LEAF].DPOTrainer
        self._keep("subclass", type("Mine", (trainer,), {"compute_reference_log_probs": _calls_super}))

    def instance(self) -> None:
        trainer = sys.modules[LEAF].DPOTrainer
        self._keep("instance", object.__new__(trainer))
        self._keep(
            "bound", {name: getattr(object.__new__(trainer), name) for names in METHODS.values() for name in names}
        )

    def by_value(self) -> None:
        self._keep("value", sys.modules[UTILS].pad_to_length)

    def _keep(self, kind: str, subject: Any) -> None:
        self.objects[f"{kind}{sum(key.startswith(kind) for key in self.objects)}"] = subject

    # Calls of trl_hotfix.

    def env(self, selection: str) -> None:
        """Do what the line in the .pth does at interpreter start."""
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
        """Run ``--list`` in this process, where it must change nothing, and keep the digest that it prints."""
        from trl_hotfix.commands.main import main

        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main(["list", "--json"])
        self.digests.append(json.loads(out.getvalue())["digest"])

    # Calls in the middle of an import.

    def half(self, selection: str) -> None:
        """Apply from a module that the leaf imports: the leaf is then in sys.modules and half executed."""
        _during_import_of(INNER, lambda: self.apply(selection), self.leaf)

    def half_thread(self, selection: str) -> None:
        _during_import_of(INNER, lambda: _in_a_thread(lambda: self.apply(selection)), self.leaf)

    def half_reload(self, selection: str) -> None:
        """Apply while a reload makes the new class: it is found at the next call of ``status``."""
        _during_import_of(INNER, lambda: self.apply(selection), self.reload)
        self.status()

    def half_revert(self) -> None:
        _during_import_of(INNER, self.revert, self.leaf)

    def finder(self, selection: str) -> None:
        """Apply from a foreign finder that is asked for the leaf: ours is too late, until ``status`` is called."""
        _during_import_of(LEAF, lambda: self.apply(selection), self.leaf)
        self.status()

    def threads(self, seed: str) -> None:
        """Import, select, revert and ask for the status, each in a thread, at once and from nothing."""
        # Not `from trl import`: TRL's own lazy module loses names when two threads import it first.
        import_other = partial(importlib.import_module, "trl.trainer.cpo_trainer")
        jobs = [
            self.leaf,
            import_other,
            self.status,
            self.revert,
            *(partial(self.apply, selection) for selection in SELECTIONS),
        ]
        random.Random(seed).shuffle(jobs)
        tracebacks: list[str] = []
        begin = threading.Barrier(len(jobs))

        def run(job: Callable[[], None]) -> None:
            try:
                begin.wait()
                job()
            except BaseException:  # noqa: BLE001
                tracebacks.append(traceback.format_exc())

        # End the process on a deadlock, and print where every thread is.
        faulthandler.dump_traceback_later(120, exit=True)
        sys.setswitchinterval(1e-5)
        threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(0.005)
        faulthandler.cancel_dump_traceback_later()
        assert not tracebacks, tracebacks[0]

    # Results.

    def seen(self) -> dict[str, Any]:
        leaf, utils = sys.modules.get(LEAF), sys.modules.get(UTILS)
        subjects = dict(self.objects)
        if leaf is not None:
            subjects |= {"class": leaf.DPOTrainer, "held": leaf.pad_to_length}
        if utils is not None:
            subjects["function"] = utils.pad_to_length
        finders = sum(type(finder).__module__.startswith("trl_hotfix.") for finder in sys.meta_path)
        return {"on": {name: _on(subject) for name, subject in subjects.items()}, "finders": finders}

    def report(self) -> dict[str, Any]:
        import trl_hotfix

        report = trl_hotfix.status()
        states = {entry.id: f"{entry.state.value} {entry.reason.value}" for entry in report}
        return {"digest": report.digest, "states": states, "self_tests": self.self_tests()}

    def self_tests(self) -> dict[str, str]:
        """Return the verdicts of the patches' own self-tests on the leaf, since behaviour is what counts."""
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
        answer = {"after": after, "report": self.report(), "end": self.seen(), "cli": self.digests}
        self.revert()
        return {**answer, "reverted": self.seen(), "vars": described_vars()}


def _calls_super(self: Any, *args: Any) -> Any:
    return super(type(self), self).compute_reference_log_probs(*args)


def _on(subject: Any) -> Any:
    """Return the patches on a class, an instance or bound methods; of a function, its answer to a mark."""
    if inspect.isroutine(subject):
        return _answer(subject)
    if isinstance(subject, type):
        subject = object.__new__(subject)
    methods = (
        subject if isinstance(subject, dict) else {n: getattr(subject, n) for names in METHODS.values() for n in names}
    )
    on = {}
    for patch, names in METHODS.items():
        answers = {_answer(methods[name]) if patch == "order-methods" else _is_ours(methods[name]) for name in names}
        # All methods of a patch are on, or none.
        on[patch] = answers.pop() if len(answers) == 1 else "half"
    return sorted(patch for patch, answer in on.items() if answer) if "half" not in on.values() else on


def _answer(function: Callable[..., Any]) -> str | None:
    """Return the answer of a patched function to a mark; TRL's own function fails on it."""
    try:
        answer = function("?")
    except (TypeError, AttributeError):
        return None
    return answer if isinstance(answer, str) else f"rubbish: {answer!r}"


def _is_ours(method: Any) -> bool:
    return bool(method.__module__ == "trl_hotfix.patching.pickled")


def described_vars() -> dict[str, list[str]]:
    """Return the names in all imported trainer modules and in their classes, in order, with their values.

    A function is described by the place of its code, which tells whether it is the one in its file.
    """
    names = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("trl.trainer.") and hasattr(module, "__file__"):
            names[name] = [_described(attribute, value) for attribute, value in vars(module).items()]
            for attribute, value in list(vars(module).items()):
                if isinstance(value, type) and value.__module__ == name:
                    names[f"{name}.{attribute}"] = [_described(inner, member) for inner, member in vars(value).items()]
    return names


def _described(key: str, value: Any) -> str:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    place = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
    return f"{key} {type(value).__module__}.{type(value).__qualname__} {place}"


class CallingFinder:
    """A foreign finder that calls a function once: when it is asked for the leaf, or while the found module runs."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action, self.called = name, action, False

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.called:
            return None
        self.called = True
        if name == LEAF:
            self.action()
            return None
        spec = PathFinder.find_spec(name, path)
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Not above: the import system holds its global lock while it asks finders, but not while a module runs.
            self.action()

        spec.loader.exec_module = exec_module
        return spec


def _during_import_of(name: str, action: Callable[[], None], start: Callable[[], None]) -> None:
    if name == INNER:
        sys.modules.pop(name, None)  # The finder is not asked for a module that is already imported.
    finder = CallingFinder(name, action)
    sys.meta_path.insert(0, finder)
    try:
        start()
    finally:
        sys.meta_path.remove(finder)
    assert finder.called, f"{name} was not asked for"


def _in_a_thread(action: Callable[[], None]) -> None:
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    thread.join(60)
    if thread.is_alive():
        faulthandler.dump_traceback()  # The stacks show what each thread waits for.
    assert not thread.is_alive(), "a deadlock: apply() waits for an import that waits for it"


def in_a_fork(work: Callable[[], Any]) -> Any:
    """Return what ``work`` returns in a child of this process, or ``{"error": traceback}``."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read_end)
        try:
            answer = work()
        except BaseException:  # noqa: BLE001
            answer = {"error": traceback.format_exc()}
        with os.fdopen(write_end, "w") as pipe:
            json.dump(answer, pipe)
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"error": f"the process ended with {status}"}


def _imports_of_trl() -> list[str]:
    """Return the modules that a process has after it imported and tested the patched ones, without TRL's and ours."""
    import trl_hotfix

    for name in (LEAF, "trl.trainer.cpo_trainer"):
        importlib.import_module(name)
    trl_hotfix.apply()
    return [name for name in sys.modules if name.partition(".")[0] not in ("trl", "trl_hotfix", "__main__")]


def serve(cases: list[list[str]]) -> list[Any]:
    """Run each case in a fork of this process, which has imported everything but TRL."""
    for name in in_a_fork(_imports_of_trl):
        # Some modules fail to import, or exist in sys.modules only, under a name of their own.
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    from trl_hotfix.catalogue import loading
    from trl_hotfix.commands import main  # noqa: F401
    from trl_hotfix.matching import fingerprints
    from trl_hotfix.patching import engine, sites  # noqa: F401

    loading.load()
    fingerprints.bodies()
    # Each child would look up the metadata of TRL dozens of times, and where every module's source is.
    metadata.distribution = functools.cache(metadata.distribution)
    inspect.getmodule(compile("", "nowhere", "exec"))
    assert "trl" not in sys.modules
    gc.collect()
    gc.freeze()  # Otherwise the first collection in each child copies the memory of this process.
    return [in_a_fork(lambda case=case: Process().run(case)) for case in cases]


def main(cases: str, answers: str, mode: str) -> None:
    orders = json.loads(Path(cases).read_text(encoding="utf-8"))
    results = serve(orders) if mode == "forked" else [Process().run(case) for case in orders]
    Path(answers).write_text(json.dumps(results), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
