"""Run inside one release: patches on top of each other.

    python together.py OUT.json orders ID...    # these, which share a method: on in every order and off in some
    python together.py OUT.json all             # all that belong here: before TRL is imported and after
    python together.py OUT.json trainers        # all that belong here, under each trainer of the release

What does not hold ends the process with what it was.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import trl_hotfix
from trl_hotfix.catalogue import loading, modules
from trl_hotfix.matching import gates, versions
from trl_hotfix.model import Outcome, Patch, State, Target
from trl_hotfix.patching import self_test
from trl_hotfix.verification import cells

import release
import trainers

TRL = versions.installed("trl") or ""
OURS = str(Path(trl_hotfix.__file__).parent)
LOSSES = ("loss", "train_loss", "objective/kl", "loss/policy_avg")
"""PPO, and RLOO of old, log no plain loss."""

Vars = Mapping[str, Mapping[str, Any]]


def every_order(patches: Sequence[Patch]) -> dict[str, int]:
    imported(patches)
    # Once for what the self-tests themselves import.
    on_one_by_one(patches)
    off_one_by_one(patches)
    before = vars_of_trl()
    orders = 0
    for there in itertools.permutations(patches):
        # From the outermost in, from the innermost out and, of three, the one between the others first.
        backs = (there, there[::-1], (*there[1:], there[0]))
        for back in {tuple(patch.id for patch in each): each for each in backs}.values():
            on_one_by_one(there)
            off_one_by_one(back, there)
            same(before, vars_of_trl())
            orders += 1
    return {"orders": orders, "compared": len(before)}


def all_of_them(patches: Sequence[Patch]) -> dict[str, int]:
    ids = [patch.id for patch in patches]
    trl_hotfix.apply(only=ids, strict=True, unknown_body="try")
    imported(patches)
    expect(patches, "fixed")
    states = {each.id: each.state for each in trl_hotfix.status() if each.id in ids}
    assert set(states.values()) <= {State.APPLIED}, states
    trl_hotfix.revert()
    expect(patches, "reproduced")
    assert not [each for each in sys.meta_path if type(each).__module__.startswith("trl_hotfix")], sys.meta_path
    before = vars_of_trl()
    nothing_of_ours(before)
    on_one_by_one(patches[::-1])
    off_one_by_one(patches)
    same(before, vars_of_trl())
    return {"patches": len(patches), "compared": len(before)}


def under_every_trainer(patches: Sequence[Patch]) -> dict[str, Any]:
    """For each trainer: its losses and what was said, in a run with all patches on; taken off, they leave no trace."""
    import torch

    # A fork of a process that has used more hangs in the first product of matrices.
    torch.set_num_threads(1)
    imported(patches)
    there = {name: make for name, make in trainers.TRAINERS.items() if trainers.there(name)}
    before = vars_of_trl()
    nothing_of_ours(before)
    report = trl_hotfix.apply(only=[patch.id for patch in patches], unknown_body="try")
    on = {each.id: f"{each.state.value} ({each.reason.value})" for each in report}

    def as_before() -> None:
        after = vars_of_trl()
        nothing_of_ours(after)
        # A trainer may have had TRL load more of itself, and a warning is noted in the module that it is of.
        same(before, {name: {key: after[name][key] for key in its} for name, its in before.items()})

    def trained(make: Callable[..., Any]) -> dict[str, Any]:
        said = trainers.Said()
        trainer = make(max_steps=2, gradient_accumulation_steps=2)
        trainer.train()
        after = {each.id: f"{each.state.value} ({each.reason.value})" for each in trl_hotfix.status()}
        assert after == on, {each: (on[each], after[each]) for each in on if on[each] != after[each]}
        trl_hotfix.revert()
        as_before()
        history = trainer.state.log_history
        losses = [value for each in history for key, value in each.items() if key in LOSSES]
        return {"losses": losses, "said": said.lines}

    found = {name: release.alone(functools.partial(trained, make), 120) for name, make in there.items()}
    trl_hotfix.revert()
    as_before()
    return {"on": on, "trainers": found}


def imported(patches: Sequence[Patch]) -> None:
    for patch in patches:
        for target in gates.targets_here(patch):
            assert cells.imported(target.module) is not None, target.name


def on_one_by_one(patches: Sequence[Patch]) -> None:
    for count in range(1, len(patches) + 1):
        on = patches[:count]
        report = trl_hotfix.apply(only=[patch.id for patch in on], strict=True, unknown_body="try")
        states = {patch.id: report[patch.id].state for patch in on}
        assert set(states.values()) == {State.APPLIED}, states
        stacked(on)
    expect(patches, "fixed")


def off_one_by_one(patches: Sequence[Patch], on: Sequence[Patch] = ()) -> None:
    """Take ``patches`` off; ``on`` is the order in which they went on, if what is left is to be looked at."""
    for count, patch in enumerate(patches, 1):
        state = trl_hotfix.revert(patch.id)[patch.id].state
        assert state is State.REVERTED, (patch.id, state)
        left = [each for each in on if each not in patches[:count]]
        stacked(left)
        expect(left, "fixed")
    expect(patches, "reproduced")


def stacked(patches: Sequence[Patch]) -> None:
    """On every target stand the wrappers of ``patches``, the last one outermost, and TRL's own function beneath."""
    on: dict[str, tuple[Target, list[Any]]] = {}
    for patch in patches:
        for target in gates.targets_here(patch):
            wrappers = on.setdefault(target.name, (target, []))[1]
            wrappers.append(bare(modules.function_of(patch, target.wrapper, {})))
    for target, wrappers in on.values():
        found, beneath = chain(target)
        assert found == wrappers[::-1], (target.name, found)
        assert not beneath.__code__.co_filename.startswith(OURS), (target.name, beneath)


def chain(target: Target) -> tuple[list[Any], Any]:
    """The wrappers on ``target``, outermost first, and the function beneath them."""
    owner: Any = sys.modules[target.module]
    *steps, name = target.attribute.split(".")
    for step in steps:
        owner = getattr(owner, step)
    installed = vars(owner)[name]
    found: list[Any] = []
    function = installed.__func__ if isinstance(installed, (staticmethod, classmethod)) else installed
    while (wrapper := wrapper_of(function)) is not None:
        found.append(bare(wrapper))
        function = function.__wrapped__
    return found, function


def bare(wrapper: Any) -> Any:
    """The wrapper as its patch defines it: without the guard around it, and without the user's options."""
    wrapper = getattr(wrapper, "wrapper", wrapper)
    return getattr(wrapper, "func", wrapper)


def wrapper_of(function: Any) -> Any:
    if type(function) is FunctionType:
        return inspect.getclosurevars(function).nonlocals.get("wrapper") if is_ours(function) else None
    return function._self_wrapper


def expect(patches: Sequence[Patch], verdict: str) -> None:
    for patch in patches:
        for leaf in dict.fromkeys(target.module for target in gates.targets_here(patch)):
            outcome = self_test.self_test(patch, sys.modules[leaf], {})
            assert isinstance(outcome, Outcome), (patch.id, leaf, outcome)
            assert outcome.verdict.value == verdict, (patch.id, leaf, outcome)


def vars_of_trl() -> Vars:
    """What every module of TRL has, and every class of TRL that can be seen in one."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and f"{name}.".startswith("trl."):
            found[name] = dict(vars(module))
            for each in found[name].values():
                if isinstance(each, type) and each.__module__.startswith("trl."):
                    found[f"{each.__module__}.{each.__qualname__}"] = dict(vars(each))
    return found


def same(before: Vars, after: Vars) -> None:
    assert after.keys() == before.keys(), after.keys() ^ before.keys()
    for name, its in before.items():
        assert list(after[name]) == list(its), (name, after[name].keys() ^ its.keys())
        for key, value in its.items():
            assert after[name][key] is value, (name, key, after[name][key])


def nothing_of_ours(found: Vars) -> None:
    for name, its in found.items():
        for key, value in its.items():
            assert not is_ours(getattr(value, "__func__", value)), (name, key, value)


def is_ours(function: Any) -> bool:
    if not isinstance(function, FunctionType):
        return False
    return type(function) is not FunctionType or function.__code__.co_filename.startswith(OURS)


def main(out: str, what: str, *ids: str) -> None:
    fitting = [patch for patch in loading.load() if gates.targets_here(patch)]
    work = {"orders": every_order, "all": all_of_them, "trainers": under_every_trainer}[what]
    answer = work([patch for patch in fitting if patch.id in ids or not ids])
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
