"""Run inside one release: every patched thing copied, pickled, hashed and sent to workers.

    python pickles.py OUT.json write FOLDER    # all patches on; leaves the pickles in FOLDER
    python pickles.py OUT.json read FOLDER     # takes each out where nothing is patched, as a spawned worker does

Written is, for each target, way and kind of thing, which patches the thing that came out has.
"""

from __future__ import annotations

import copy
import functools
import json
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any

import cloudpickle
import dill

import trl_hotfix
from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates, versions
from trl_hotfix.model import Patch, State, Target
from trl_hotfix.patching import references
from trl_hotfix.verification import cells

import made_up

MADE_UP = (
    ("made-up-static", "trl.trainer.dpo_trainer", "DPOTrainer.tokenize_row", False),
    ("made-up-class", "trl.models.modeling_base", "PreTrainedModelWrapper.from_pretrained", False),
    ("made-up-traced", "trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", True),
    ("made-up-traced-function", "trl.trainer.utils", "selective_log_softmax", True),
)
"""Kinds of targets that the catalogue has none of, in 0.16.1."""

INTO_BYTES: Mapping[str, Callable[[Any], bytes]] = {
    "pickle": pickle.dumps,
    "pickle by the oldest protocol": lambda value: pickle.dumps(value, 0),
    "multiprocessing": lambda value: bytes(ForkingPickler.dumps(value)),
    "dill": dill.dumps,
    "dill with recurse": lambda value: dill.dumps(value, recurse=True),
    "cloudpickle": cloudpickle.dumps,
}
FRESH = (
    ("pickle", "attribute"),
    ("pickle", "bound"),
    ("dill", "lambda of bound"),
    ("dill", "lambda of instance"),
    ("cloudpickle", "attribute"),
    ("cloudpickle", "partial of bound"),
)
"""What is taken out in the other process too: each puts its patches on, with their self-tests."""

COPIES: Mapping[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy}
UNABLE = (AttributeError, TypeError, pickle.PicklingError)
Names = list[Any] | None


def loads(way: str, data: bytes) -> Any:
    return (dill if way.startswith("dill") else pickle).loads(data)


def things(target: Target) -> dict[str, Any]:
    """What a program may have in its hands of a patched target."""
    owner: Any = cells.imported(target.module)
    *steps, name = target.attribute.split(".")
    for step in steps:
        owner = getattr(owner, step)
    function = getattr(owner, name)
    found = {"attribute": function, "partial": functools.partial(function, 1), "lambda": lambda: function}
    if isinstance(owner, type):
        instance = object.__new__(owner)
        vars(instance)["mark"] = 17
        bound = getattr(instance, name)
        found |= {"bound": bound, "partial of bound": functools.partial(bound, 1), "lambda of bound": lambda: bound}
        found["lambda of instance"] = lambda: getattr(instance, name)
    return found


def patches_of(thing: Any) -> Names:
    """The patches that ``thing`` has, with revisions and options; None if it is TRL's own function."""
    if isinstance(thing, functools.partial):
        thing = thing.func
    elif type(thing) is FunctionType and thing.__name__ == "<lambda>":
        thing = thing()
    instance = getattr(thing, "__self__", None)
    assert instance is None or isinstance(instance, type) or vars(instance) == {"mark": 17}, vars(instance)
    if type(thing) is MethodType:
        thing = thing.__func__
    if type(thing) is FunctionType:
        if thing.__module__ != references.__name__:
            return None
        named = tuple(map(references._named, thing.__qualname__.split("|")[2:]))
    else:
        _, _, named = (getattr(thing, "_self_parent", None) or thing)._self_reference
    return [[patch_id, revision, dict(options)] for patch_id, revision, options in named]


def ways_of(kind: str) -> Iterator[str]:
    for way in INTO_BYTES:
        if not kind.startswith("lambda") or way.startswith(("dill", "cloudpickle")):
            yield way


def impossible(targets: Iterable[Target]) -> set[tuple[str, str, str]]:
    """What cannot be pickled and loaded without patches either: dill with recurse takes TRL's globals by value."""
    found = set()
    for target in targets:
        for kind, thing in things(target).items():
            for way in ways_of(kind):
                try:
                    loads(way, INTO_BYTES[way](thing))
                except UNABLE:
                    found.add((target.name, kind, way))
    return found


def write(folder: Path) -> dict[str, Any]:
    """Answers ``{target: {"expected": names, "came out": {"way: kind": names}, "hashes": ...}}``."""
    from datasets import Dataset
    from datasets.fingerprint import Hasher

    every = [patch for patch in loading.load() if gates.targets_here(patch)]
    without = impossible({target.name: target for patch in every for target in gates.targets_here(patch)}.values())
    options = {patch.id: patch.every_choice()[-1] for patch in every if patch.options}
    report = trl_hotfix.apply(only=[patch.id for patch in every], options=options, strict=True, unknown_body="try")
    by_target: dict[str, tuple[Target, list[Patch]]] = {}
    for patch in every:
        for target in gates.targets_here(patch):
            by_target.setdefault(target.name, (target, []))[1].append(patch)
            cells.imported(target.module)
    report = trl_hotfix.status()
    assert {report[patch.id].state for patch in every} == {State.APPLIED}, report

    answer: dict[str, dict[str, Any]] = {}
    pickles, held = {}, []
    for name, (target, patches) in by_target.items():
        expected = [[patch.id, patch.revision, dict(report[patch.id].options)] for patch in patches]
        came_out, hashes = {}, {}
        for kind, thing in things(target).items():
            held.append((name, kind, thing))
            for way in ways_of(kind):
                try:
                    data = INTO_BYTES[way](thing)
                    came_out[f"{way}: {kind}"] = patches_of(loads(way, data))
                except UNABLE:
                    if (name, kind, way) not in without:
                        raise
                    continue
                if (way, kind) in FRESH:
                    pickles[name, way, kind] = data
            for way, copied in COPIES.items():
                came_out[f"{way}: {kind}"] = patches_of(copied(thing))
            if kind in ("attribute", "bound"):
                hashes[kind] = Hasher.hash(thing)
        answer[name] = {"expected": expected, "came out": came_out, "hashes": hashes}
    (folder / "pickles").write_bytes(pickle.dumps(pickles))
    rows = Dataset.from_dict({"index": list(range(len(held)))})
    mapped = rows.map(lambda row: {"found": json.dumps(patches_of(held[row["index"]][2]))}, num_proc=2)
    for (name, kind, _), found in zip(held, mapped["found"], strict=True):
        answer[name]["came out"][f"Dataset.map: {kind}"] = json.loads(found)
    return answer


def read(folder: Path) -> dict[str, Any]:
    """Answers ``{target: {"came out": {"way: kind": names}, "on": {"way: kind": ids}, "hashes": ...}}``."""
    from datasets.fingerprint import Hasher

    pickles = pickle.loads((folder / "pickles").read_bytes())
    every = {target.name: target for patch in loading.load() for target in gates.targets_here(patch)}
    answer: dict[str, Any] = {name: {"came out": {}, "on": {}, "hashes": {}} for name, _, _ in pickles}
    assert "trl" not in sys.modules
    # Nothing is on; but where it is told to, a worker too takes a body that is on no record.
    trl_hotfix.apply(only=[], unknown_body="try")
    for name, way, kind in pickles:
        thing = loads(way, pickles[name, way, kind])
        its = answer[name]
        its["came out"][f"{way}: {kind}"] = patches_of(thing)
        its["on"][f"{way}: {kind}"] = sorted(each.id for each in trl_hotfix.status() if each.state is State.APPLIED)
        if kind in ("attribute", "bound"):
            its["hashes"][kind] = [Hasher.hash(thing)]
        trl_hotfix.revert()
    for name, its in answer.items():
        for kind, thing in things(every[name]).items():
            assert patches_of(thing) is None, (name, kind)
            if kind in its["hashes"]:
                its["hashes"][kind].append(Hasher.hash(thing))
    return answer


TRL = versions.installed("trl") or ""


def main(out: str, what: str, folder: str) -> None:
    if TRL == "0.16.1":
        for patch_id, module, attribute, traced in MADE_UP:
            made_up.declare(patch_id, module, attribute, traced=traced)
    answer = {"write": write, "read": read}[what](Path(folder))
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
