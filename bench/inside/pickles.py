"""Run inside one release: copy, pickle and hash every reference to a patched function, and send it to workers.

    python -m bench.inside.pickles OUT.json write FOLDER    # with all patches on; writes the pickles to FOLDER
    python -m bench.inside.pickles OUT.json read FOLDER     # loads each where nothing is patched, as a worker does

The answer has, for each target, way and kind of reference, the patches of the reference after the round trip.
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

from bench.inside import made_up

MADE_UP = (
    ("made-up-static", "trl.trainer.dpo_trainer", "DPOTrainer.tokenize_row", False),
    ("made-up-class", "trl.models.modeling_base", "PreTrainedModelWrapper.from_pretrained", False),
    ("made-up-traced", "trl.trainer.dpo_trainer", "DPOTrainer.dpo_loss", True),
    ("made-up-traced-function", "trl.trainer.utils", "selective_log_softmax", True),
)
"""Kinds of targets that the catalogue lacks, in 0.16.1."""

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
    ("dill", "bound"),
    ("dill", "lambda of bound"),
    ("dill", "lambda of instance"),
    ("cloudpickle", "attribute"),
    ("cloudpickle", "partial of bound"),
)
"""Pickles that the other process loads too. Each applies its patches, with their self-tests."""

COPIES: Mapping[str, Callable[[Any], Any]] = {"copy": copy.copy, "deepcopy": copy.deepcopy}
UNABLE = (AttributeError, TypeError, pickle.PicklingError)
Names = list[Any] | None


def loads(way: str, data: bytes) -> Any:
    return (dill if way.startswith("dill") else pickle).loads(data)


def references_to(target: Target) -> dict[str, Any]:
    """Return the references that a program may hold to a patched target."""
    owner: Any = cells.imported(target.module)
    *steps, name = target.attribute.split(".")
    for step in steps:
        owner = getattr(owner, step)
    function = getattr(owner, name)
    by_kind = {"attribute": function, "partial": functools.partial(function, 1), "lambda": lambda: function}
    if isinstance(owner, type):
        instance = object.__new__(owner)
        vars(instance)["mark"] = 17
        bound = getattr(instance, name)
        by_kind |= {
            "bound": bound,
            "partial of bound": functools.partial(bound, 1),
            "lambda of bound": lambda: bound,
        }
        by_kind["lambda of instance"] = lambda: getattr(instance, name)
    return by_kind


def patches_of(reference: Any) -> Names:
    """Return the patches of ``reference``, with revisions and options; None if it is TRL's own function."""
    if isinstance(reference, functools.partial):
        reference = reference.func
    elif type(reference) is FunctionType and reference.__name__ == "<lambda>":
        reference = reference()
    instance = getattr(reference, "__self__", None)
    assert instance is None or isinstance(instance, type) or vars(instance) == {"mark": 17}, vars(instance)
    if type(reference) is MethodType:
        reference = reference.__func__
    assert type(reference) is FunctionType, reference
    if reference.__module__ != references.MODULE:
        return None
    names = tuple(map(references._named, reference.__qualname__.split("|")[2:]))
    return [[patch_id, revision, dict(options)] for patch_id, revision, options in names]


def ways_of(kind: str) -> Iterator[str]:
    for way in INTO_BYTES:
        if not kind.startswith("lambda") or way.startswith(("dill", "cloudpickle")):
            yield way


def unpicklable(targets: Iterable[Target]) -> set[tuple[str, str, str]]:
    """Return the cases that fail without patches too: dill with recurse pickles TRL's globals by value."""
    failing = set()
    for target in targets:
        for kind, reference in references_to(target).items():
            for way in ways_of(kind):
                try:
                    loads(way, INTO_BYTES[way](reference))
                except UNABLE:
                    failing.add((target.name, kind, way))
    return failing


def write(folder: Path) -> dict[str, Any]:
    """Return ``{target: {"expected": names, "came out": {"way: kind": names}, "hashes": ...}}``."""
    from datasets import Dataset
    from datasets.fingerprint import Hasher

    patches_here = [patch for patch in loading.load() if gates.targets_here(patch)]
    targets = {target.name: target for patch in patches_here for target in cells.runnable(gates.targets_here(patch))}
    impossible_cases = unpicklable(targets.values())
    options = {patch.id: patch.every_choice()[-1] for patch in patches_here if patch.options}
    report = trl_hotfix.apply(
        only=[patch.id for patch in patches_here], options=options, strict="all", unknown_body="try"
    )
    by_target: dict[str, tuple[Target, list[Patch]]] = {}
    for patch in patches_here:
        for target in cells.runnable(gates.targets_here(patch)):
            by_target.setdefault(target.name, (target, []))[1].append(patch)
            cells.imported(target.module)
    report = trl_hotfix.status()
    assert {report[patch.id].state for patch in patches_here} == {State.APPLIED}, report

    answer: dict[str, dict[str, Any]] = {}
    pickles, held = {}, []
    for name, (target, patches) in by_target.items():
        # Layers lie in the order of ids, whatever the file's.
        in_order = sorted(patches, key=lambda patch: patch.id)
        expected = [[patch.id, patch.revision, dict(report[patch.id].options)] for patch in in_order]
        came_out, hashes = {}, {}
        for kind, reference in references_to(target).items():
            held.append((name, kind, reference))
            for way in ways_of(kind):
                try:
                    data = INTO_BYTES[way](reference)
                    came_out[f"{way}: {kind}"] = patches_of(loads(way, data))
                except UNABLE:
                    if (name, kind, way) not in impossible_cases:
                        raise
                    continue
                if (way, kind) in FRESH:
                    pickles[name, way, kind] = data
            for way, copied in COPIES.items():
                came_out[f"{way}: {kind}"] = patches_of(copied(reference))
            if kind in ("attribute", "bound"):
                hashes[kind] = Hasher.hash(reference)
        is_static = type(references_to(target).get("bound")) is FunctionType
        answer[name] = {"expected": expected, "came out": came_out, "hashes": hashes, "static": is_static}
    (folder / "pickles").write_bytes(pickle.dumps(pickles))
    rows = Dataset.from_dict({"index": list(range(len(held)))})
    mapped = rows.map(lambda row: {"found": json.dumps(patches_of(held[row["index"]][2]))}, num_proc=2)
    for (name, kind, _), names in zip(held, mapped["found"], strict=True):
        answer[name]["came out"][f"Dataset.map: {kind}"] = json.loads(names)
    return answer


def read(folder: Path) -> dict[str, Any]:
    """Return ``{target: {"came out": {"way: kind": names}, "on": {"way: kind": ids}, "hashes": ...}}``."""
    from datasets.fingerprint import Hasher

    pickles = pickle.loads((folder / "pickles").read_bytes())
    targets = {target.name: target for patch in loading.load() for target in gates.targets_here(patch)}
    answer: dict[str, Any] = {name: {"came out": {}, "on": {}, "hashes": {}} for name, _, _ in pickles}
    assert "trl" not in sys.modules
    # No patch is on. The setting lets a pickle patch a body that is not on record.
    trl_hotfix.apply(only=[], unknown_body="try")
    for name, way, kind in pickles:
        reference = loads(way, pickles[name, way, kind])
        of_target = answer[name]
        came_out = of_target["came out"][f"{way}: {kind}"] = patches_of(reference)
        of_target["on"][f"{way}: {kind}"] = sorted(
            entry.id for entry in trl_hotfix.status() if entry.state is State.APPLIED
        )
        if kind in ("attribute", "bound") and came_out is not None:
            of_target["hashes"][kind] = [Hasher.hash(reference)]
        trl_hotfix.revert()
    for name, of_target in answer.items():
        for kind, reference in references_to(targets[name]).items():
            assert patches_of(reference) is None, (name, kind)
            if kind in of_target["hashes"]:
                of_target["hashes"][kind].append(Hasher.hash(reference))
    return answer


TRL = versions.installed("trl") or ""


def main(out: str, mode: str, folder: str) -> None:
    if TRL == "0.16.1":
        for patch_id, module, attribute, traced in MADE_UP:
            made_up.declare(patch_id, module, attribute, traced=traced)
    answer = {"write": write, "read": read}[mode](Path(folder))
    Path(out).write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
