"""Red, green, red: does each patch do what it says, on the TRL that is installed?

``python -m trl_hotfix.verification OUT ID...`` does it in this process and writes the answers to OUT, a line of JSON
each. The command line calls it in a fresh process, since one that has patched or imported things is no witness.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..catalogue import loading, packs
from ..matching import digests, fingerprints, gates
from ..matching.versions import installed
from ..model import Decision, Options, Outcome, Patch, State, Verdict
from ..patching import engine
from ..patching.self_test import self_test


class SelfTestError(Exception):
    """A self-test raised, and so said nothing about the bug. The message ends with its traceback."""


class CellVerdict(str, Enum):
    """What is known of one patch on one TRL release."""

    PROVEN = "proven"
    ABSENT = "absent"
    NOT_REPRODUCED = "not-reproduced"
    UNREPAIRED = "unrepaired"
    UNCOVERED = "uncovered"
    ERROR = "error"

    @property
    def good(self) -> bool:
        return self in (CellVerdict.PROVEN, CellVerdict.ABSENT)


@dataclass(slots=True)
class Cell:
    """One patch on the installed TRL. ``leaves`` has, for each leaf module, the outcome of each self-test run;
    ``bodies``, for each target that is there, the fingerprint of its body."""

    patch: str
    revision: int
    trl: str
    verdict: CellVerdict
    why: str = ""
    leaves: dict[str, dict[str, Any]] = field(default_factory=dict)
    bodies: dict[str, str | None] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "patch": self.patch,
            "revision": self.revision,
            "trl": self.trl,
            "verdict": self.verdict.value,
            "why": self.why,
            "leaves": self.leaves,
            "bodies": self.bodies,
        }


def verify(patch: Patch) -> Cell:
    """One patch on the TRL installed here, in this process. Nothing of it is left on afterwards."""
    trl = installed("trl")
    if trl is None:
        return Cell(patch.id, patch.revision, "", CellVerdict.ERROR, "TRL is not installed")
    cell = Cell(patch.id, patch.revision, trl, CellVerdict.ABSENT)
    here = {target.module for target in gates.targets_here(patch)}
    try:
        found = {
            leaf: _one_leaf(patch, leaf, inside=leaf in here, cell=cell)
            for leaf in dict.fromkeys(target.module for target in patch.targets)
        }
    except SelfTestError as error:
        cell.verdict, cell.why = CellVerdict.ERROR, str(error).splitlines()[0]
        print(error, file=sys.stderr)
        return cell
    # A release that breaks in an unknown way when it is imported is a finding, not the end of the run over all of them.
    except Exception as error:  # noqa: BLE001
        cell.verdict, cell.why = CellVerdict.ERROR, f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), file=sys.stderr)
        return cell
    worst_first = (*(each for each in CellVerdict if not each.good), CellVerdict.PROVEN, CellVerdict.ABSENT)
    cell.verdict, cell.why = min(found.values(), key=lambda each: worst_first.index(each[0]))
    return cell


def _one_leaf(patch: Patch, leaf: str, *, inside: bool, cell: Cell) -> tuple[CellVerdict, str]:
    seen = cell.leaves.setdefault(leaf, {})
    module = imported(leaf)
    targets = [target for target in patch.targets if target.module == leaf]
    missing = [each for each in targets if module is None or _found(module, each.attribute) is None]
    # A method that has another name in other releases is a target under each of them, with a range of its own.
    wanted = gates.targets_for(patch, cell.trl) if inside else targets
    if module is None or any(each in wanted for each in missing):
        why = f"{leaf} has no {', '.join(each.attribute for each in missing if each in wanted)}"
        return (CellVerdict.ERROR if inside else CellVerdict.ABSENT), why
    targets = [each for each in targets if each not in missing]

    for target in targets:
        body = cell.bodies[target.name] = digests.loaded(_found(module, target.attribute)).digest
        on_record = fingerprints.bodies_for(patch.id).at(target.name, cell.trl)
        if on_record not in (None, body):
            return CellVerdict.ERROR, f"{target.name} has body {body}; on record for TRL {cell.trl} is {on_record}"

    found = (CellVerdict.ABSENT, "")
    for options in patch.every_choice():
        found = _red_green_red(patch, module, options, inside=inside, seen=seen)
        if not found[0].good:
            break
    return found


def _red_green_red(
    patch: Patch, module: ModuleType, options: Options, *, inside: bool, seen: dict[str, Any]
) -> tuple[CellVerdict, str]:
    # What differs from the defaults is part of a run's name.
    others = [f"{name}={choice}" for name, choice in options.items() if choice != patch.options[name].default]
    with_them = f" ({', '.join(others)})" if others else ""

    def test(run: str) -> Outcome:
        outcome = self_test(patch, module, options)
        if isinstance(outcome, Decision):
            trace = outcome.evidence.get("traceback", "")
            raise SelfTestError(f"{run}{with_them}: {outcome.evidence['error']}\n{trace}".strip())
        seen[run + with_them] = outcome.to_dict()
        return outcome

    red = test("red")
    if not inside:
        bug = red.verdict is Verdict.REPRODUCED
        why = f"out of range, but the bug is in {module.__name__}{with_them}"
        return (CellVerdict.UNCOVERED, why) if bug else (CellVerdict.ABSENT, "")
    if red.verdict is not Verdict.REPRODUCED:
        return CellVerdict.NOT_REPRODUCED, f"in range, but the self-test says {red.verdict.value}{with_them}"

    # A body that is not on record yet is what the bench is there to prove.
    with engine.ENGINE.patched((patch.id,), False, {patch.id: options}, unknown_body="try") as report:
        status = report[patch.id]
        if status.state is not State.APPLIED:
            return CellVerdict.UNREPAIRED, f"{status.state.value} ({status.reason.value}): {dict(status.evidence)}"
        green = test("green")
    if green.verdict is not Verdict.FIXED:
        return CellVerdict.UNREPAIRED, f"patched, the self-test says {green.verdict.value}{with_them}"
    again = test("red again")
    if again.verdict is not Verdict.REPRODUCED:
        return CellVerdict.ERROR, f"after revert, the self-test says {again.verdict.value}{with_them}"
    return CellVerdict.PROVEN, ""


def imported(leaf: str) -> ModuleType | None:
    """The leaf module, or None if this TRL has none of that name. An error inside it is not caught."""
    names = leaf.split(".")
    for depth in range(1, len(names) + 1):
        if find_spec(".".join(names[:depth])) is None:
            return None
    return import_module(leaf)


def _found(module: ModuleType, attribute: str) -> Any:
    """What stands at ``attribute``, or None."""
    found: Any = module
    for step in attribute.split("."):
        found = getattr(found, step, None)
    return found


def main(arguments: Sequence[str]) -> None:
    out, *ids = arguments
    names = packs.named(None, os.environ)
    with Path(out).open("w", encoding="utf-8") as file:
        for patch in loading.known(names):
            if not ids or patch.id in ids:
                # One line as soon as it is known: whoever waits sees how far it is, and what was seen before a crash.
                print(json.dumps(verify(patch).to_dict()), file=file, flush=True)
