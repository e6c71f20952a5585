"""Run inside one release: several patches on the same methods.

    python -m bench.inside.together OUT.json SECONDS TASK...

A task is one of

    all         all patches of the release: before TRL is imported and after
    trainers    all patches of the release, under each of its trainers
    ID+ID...    these, which share a method: applied and removed one by one, in the orders of ``orderings.py``

Each runs in a fork. Its answer is a text, the traceback, if an assertion fails.
"""

from __future__ import annotations

import functools
import inspect
import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import trl_hotfix
from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates
from trl_hotfix.model import Outcome, Patch, State, Target
from trl_hotfix.patching import self_test
from trl_hotfix.verification import cells

from bench.inside import trainers
from bench.proving import orderings, release

OURS = str(Path(trl_hotfix.__file__).parent)
LOSSES = ("loss", "train_loss", "objective/kl", "loss/policy_avg")
"""PPO and older RLOO log no plain loss."""

Vars = Mapping[str, Mapping[str, Any]]


def in_orders(patches: Sequence[Patch]) -> dict[str, int]:
    import_targets(patches)
    # The first round makes the self-tests import all that they need.
    on_one_by_one(patches)
    off_one_by_one(patches)
    before = vars_of_trl()
    by_id = {patch.id: patch for patch in patches}
    rounds = orderings.rounds(list(by_id))
    for on, off in rounds:
        applied = [by_id[patch_id] for patch_id in on]
        on_one_by_one(applied)
        off_one_by_one([by_id[patch_id] for patch_id in off], applied)
        assert_same(before, vars_of_trl())
    return {"rounds": len(rounds), "seed": orderings.SEED, "compared": len(before)}


def all_of_them(patches: Sequence[Patch]) -> dict[str, Any]:
    ids = [patch.id for patch in patches]
    recorder = trainers.MessageRecorder(logging.WARNING)
    trl_hotfix.apply(only=ids, strict="all", unknown_body="try")
    import_targets(patches)
    warnings = list(recorder.lines)
    assert_verdicts(patches, "fixed")
    states = {entry.id: entry.state for entry in trl_hotfix.status() if entry.id in ids}
    assert set(states.values()) <= {State.APPLIED}, states
    trl_hotfix.revert()
    assert_verdicts(patches, "reproduced")
    assert not [finder for finder in sys.meta_path if type(finder).__module__.startswith("trl_hotfix")], sys.meta_path
    before = vars_of_trl()
    assert_unpatched(before)
    on_one_by_one(patches[::-1])
    off_one_by_one(patches)
    assert_same(before, vars_of_trl())
    return {"patches": len(patches), "compared": len(before), "warnings": warnings}


def under_every_trainer(patches: Sequence[Patch]) -> dict[str, Any]:
    """Return each trainer's losses and messages in a run with all patches on; check that reverting leaves no trace."""
    import torch

    # A fork of a process that has used more threads hangs in the first matrix product.
    torch.set_num_threads(1)
    import_targets(patches)
    makers = {name: make for name, make in trainers.TRAINERS.items() if trainers.is_available(name)}
    before = vars_of_trl()
    assert_unpatched(before)
    report = trl_hotfix.apply(only=[patch.id for patch in patches], unknown_body="try")
    on = {entry.id: f"{entry.state.value} ({entry.reason.value})" for entry in report}

    def as_before() -> None:
        after = vars_of_trl()
        assert_unpatched(after)
        # A trainer may make TRL load more of its modules, and a warning adds a registry to its module.
        known = {name: {key: after[name][key] for key in attributes} for name, attributes in before.items()}
        assert_same(before, known)

    def trained(make: Callable[..., Any]) -> dict[str, Any]:
        recorder = trainers.MessageRecorder()
        trainer = make(max_steps=2, gradient_accumulation_steps=2)
        trainer.train()
        after = {entry.id: f"{entry.state.value} ({entry.reason.value})" for entry in trl_hotfix.status()}
        assert after == on, {name: (on[name], after[name]) for name in on if on[name] != after[name]}
        trl_hotfix.revert()
        as_before()
        history = trainer.state.log_history
        losses = [value for entry in history for key, value in entry.items() if key in LOSSES]
        return {"losses": losses, "said": recorder.lines}

    answers = {name: release.alone(functools.partial(trained, make), 120) for name, make in makers.items()}
    trl_hotfix.revert()
    as_before()
    return {"on": on, "trainers": answers}


def import_targets(patches: Sequence[Patch]) -> None:
    for patch in patches:
        for target in cells.runnable(gates.targets_here(patch)):
            assert cells.imported(target.module) is not None, target.name


def on_one_by_one(patches: Sequence[Patch]) -> None:
    for count in range(1, len(patches) + 1):
        on = patches[:count]
        report = trl_hotfix.apply(only=[patch.id for patch in on], strict="all", unknown_body="try")
        states = {patch.id: report[patch.id].state for patch in on}
        assert set(states.values()) == {State.APPLIED}, states
        assert_stacked(on)
    assert_verdicts(patches, "fixed")


def off_one_by_one(patches: Sequence[Patch], on: Sequence[Patch] = ()) -> None:
    """Revert ``patches`` one by one. ``on`` is the order in which they were applied; if given, the rest is checked.

    The self-tests of the rest are run after each of up to three, and of more after half of them: their number would
    grow with the square of the patches.
    """
    for count, patch in enumerate(patches, 1):
        state = trl_hotfix.revert(patch.id)[patch.id].state
        assert state is State.REVERTED, (patch.id, state)
        remaining = [patch for patch in on if patch not in patches[:count]]
        assert_stacked(remaining)
        if len(patches) <= 3 or count == len(patches) // 2:
            assert_verdicts(remaining, "fixed")
    assert_verdicts(patches, "reproduced")


def assert_stacked(patches: Sequence[Patch]) -> None:
    """Check that each target has the wrappers of ``patches`` in the order of ids around TRL's own function."""
    on: dict[str, tuple[Target, list[Any]]] = {}
    for patch in sorted(patches, key=lambda each: each.id):
        for target in cells.runnable(gates.targets_here(patch)):
            wrappers = on.setdefault(target.name, (target, []))[1]
            wrappers.append(unwrapped(modules.function_of(patch, target.wrapper, {})))
    for target, wrappers in on.values():
        wrappers_found, beneath = wrappers_on(target)
        assert wrappers_found == wrappers[::-1], (target.name, wrappers_found)
        assert not beneath.__code__.co_filename.startswith(OURS), (target.name, beneath)


def wrappers_on(target: Target) -> tuple[list[Any], Any]:
    """Return the wrappers on ``target``, outermost first, and the function beneath them."""
    owner: Any = sys.modules[target.module]
    *steps, name = target.attribute.split(".")
    for step in steps:
        owner = getattr(owner, step)
    installed = vars(owner)[name]
    wrappers: list[Any] = []
    function = installed.__func__ if isinstance(installed, (staticmethod, classmethod)) else installed
    while is_ours(function):
        wrapper = wrapper_of(function)
        # A layer that only notes the arguments of a constructor has none.
        if wrapper is not None:
            wrappers.append(unwrapped(wrapper))
        function = function.__wrapped__
    return wrappers, function


def unwrapped(wrapper: Any) -> Any:
    """Return the wrapper as its patch defines it: without the user's options."""
    return getattr(wrapper, "func", wrapper)


def wrapper_of(function: Any) -> Any:
    return inspect.getclosurevars(function).nonlocals.get("wrapper") if is_ours(function) else None


def assert_verdicts(patches: Sequence[Patch], verdict: str) -> None:
    for patch in patches:
        for module_name in dict.fromkeys(target.module for target in cells.runnable(gates.targets_here(patch))):
            outcome = self_test.self_test(patch, sys.modules[module_name], {})
            assert isinstance(outcome, Outcome), (patch.id, module_name, outcome)
            assert outcome.verdict.value == verdict, (patch.id, module_name, outcome)


def vars_of_trl() -> Vars:
    """Return the attributes of every module of TRL, and of every class of TRL in one of them."""
    by_name: dict[str, Mapping[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and f"{name}.".startswith("trl."):
            by_name[name] = dict(vars(module))
            for value in by_name[name].values():
                if isinstance(value, type) and value.__module__.startswith("trl."):
                    by_name[f"{value.__module__}.{value.__qualname__}"] = dict(vars(value))
    return by_name


def assert_same(before: Vars, after: Vars) -> None:
    assert after.keys() == before.keys(), after.keys() ^ before.keys()
    for name, attributes in before.items():
        assert list(after[name]) == list(attributes), (name, after[name].keys() ^ attributes.keys())
        for key, value in attributes.items():
            assert after[name][key] is value, (name, key, after[name][key])


def assert_unpatched(attributes_by_name: Vars) -> None:
    for name, attributes in attributes_by_name.items():
        for key, value in attributes.items():
            assert not is_ours(getattr(value, "__func__", value)), (name, key, value)


def is_ours(function: Any) -> bool:
    return isinstance(function, FunctionType) and function.__code__.co_filename.startswith(OURS)


def run(task: str) -> Any:
    """Return the answer to a task, or the traceback of what failed."""
    patches = [patch for patch in loading.load() if gates.targets_here(patch)]
    try:
        if task == "all":
            return all_of_them(patches)
        if task == "trainers":
            return under_every_trainer(patches)
        return in_orders([patch for patch in patches if patch.id in task.split("+")])
    # Any error of a patch or a release is the finding.
    except Exception:  # noqa: BLE001
        return traceback.format_exc()


def main(out: str, seconds: str, *tasks: str) -> None:
    answers = {}
    # `all` begins before TRL is imported. The other tasks share one import of it.
    for task in sorted(tasks, key=lambda task: task != "all"):
        if task != "all":
            release.warm(loading.load())
        answers[task] = release.in_a_fork(run, task, float(seconds))
    Path(out).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
