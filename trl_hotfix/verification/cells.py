"""Run the self-tests of patches on the installed TRL: red without the patch, green with it, red after revert.

``python -m trl_hotfix.verification OUT ID...`` does so in this process and writes the cells to OUT, a line of JSON
each. The command line calls it in a fresh process, since earlier imports or patches could change the result.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ..catalogue import loading, packs
from ..matching import digests, fingerprints, gates
from ..matching.versions import installed
from ..model import Decision, Options, Outcome, Patch, State, Target, Verdict
from ..patching import engine
from ..patching.self_test import self_test


class SelfTestError(Exception):
    """A self-test raised, so there is no verdict about the bug. The message ends with its traceback."""


class CellVerdict(str, Enum):
    """The verdict on one patch on one TRL release."""

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
    """One patch on the installed TRL.

    ``leaves`` has the outcome of each self-test run by module, ``bodies`` the fingerprint of each target that exists.
    """

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
    """Verify one patch on the installed TRL, in this process. The patch is off again afterwards."""
    trl = installed("trl")
    if trl is None:
        return Cell(patch.id, patch.revision, "", CellVerdict.ERROR, "TRL is not installed")
    cell = Cell(patch.id, patch.revision, trl, CellVerdict.ABSENT)
    modules_in_range = {target.module for target in gates.targets_here(patch)}
    try:
        verdicts = {
            module: _verify_module(patch, module, inside=module in modules_in_range, cell=cell)
            for module in dict.fromkeys(target.module for target in patch.targets)
        }
    except SelfTestError as error:
        cell.verdict, cell.why = CellVerdict.ERROR, str(error).splitlines()[0]
        print(error, file=sys.stderr)
        return cell
    # A release that cannot be imported is a finding. It must not end the run over all releases.
    except Exception as error:  # noqa: BLE001
        cell.verdict, cell.why = CellVerdict.ERROR, f"{type(error).__name__}: {error}"
        print(traceback.format_exc(), file=sys.stderr)
        return cell
    worst_first = (*(verdict for verdict in CellVerdict if not verdict.good), CellVerdict.PROVEN, CellVerdict.ABSENT)
    cell.verdict, cell.why = min(verdicts.values(), key=lambda verdict: worst_first.index(verdict[0]))
    return cell


def _verify_module(patch: Patch, name: str, *, inside: bool, cell: Cell) -> tuple[CellVerdict, str]:
    """Return the verdict on the targets in the module ``name``, and the reason. ``inside``: they are in range."""
    runs = cell.leaves.setdefault(name, {})
    try:
        module = imported(name)
    except ImportError as error:
        if inside and not _is_of_a_library(error):
            raise
        # Beside a library that is too old for it, or too new, nobody can run the code of this module.
        return CellVerdict.ABSENT, f"{name} cannot be imported here: {error}"
    targets = [target for target in patch.targets if target.module == name]
    missing = [target for target in targets if module is None or _attribute_of(module, target.attribute) is None]
    # A method with another name in other releases is a target under each name, with a range of its own.
    required = gates.targets_for(patch, cell.trl) if inside else targets
    if module is None or any(target in required for target in missing):
        reason = f"{name} has no {', '.join(target.attribute for target in missing if target in required)}"
        return (CellVerdict.ERROR if inside else CellVerdict.ABSENT), reason
    targets = [target for target in targets if target not in missing]

    for target in targets:
        body = cell.bodies[target.name] = digests.loaded(_attribute_of(module, target.attribute)).digest
        on_record = fingerprints.bodies_for(patch.id).at(target.name, cell.trl, installed("transformers"))
        if on_record not in (None, body):
            return CellVerdict.ERROR, f"{target.name} has body {body}; on record for TRL {cell.trl} is {on_record}"

    verdict = (CellVerdict.ABSENT, "")
    for options in patch.every_choice():
        verdict = _red_green_red(patch, module, options, inside=inside, runs=runs)
        if not verdict[0].good:
            break
    return verdict


def _red_green_red(
    patch: Patch, module: ModuleType, options: Options, *, inside: bool, runs: dict[str, Any]
) -> tuple[CellVerdict, str]:
    # Options that differ from the defaults are part of a run's name.
    changed = [f"{name}={choice}" for name, choice in options.items() if choice != patch.options[name].default]
    suffix = f" ({', '.join(changed)})" if changed else ""

    def test(run: str) -> Outcome:
        outcome = self_test(patch, module, options)
        if isinstance(outcome, Decision):
            trace = outcome.evidence.get("traceback", "")
            raise SelfTestError(f"{run}{suffix}: {outcome.evidence['error']}\n{trace}".strip())
        runs[run + suffix] = outcome.to_dict()
        return outcome

    red = test("red")
    if not inside:
        if red.verdict is Verdict.REPRODUCED:
            return CellVerdict.UNCOVERED, f"out of range, but the bug is in {module.__name__}{suffix}"
        return CellVerdict.ABSENT, ""
    if red.verdict is not Verdict.REPRODUCED:
        return CellVerdict.NOT_REPRODUCED, f"in range, but the self-test says {red.verdict.value}{suffix}"

    # The bench has to prove bodies that are not on record yet, so they are tried.
    with engine.ENGINE.patched((patch.id,), False, {patch.id: options}, unknown_body="try") as report:
        status = report[patch.id]
        if status.state is not State.APPLIED:
            return CellVerdict.UNREPAIRED, f"{status.state.value} ({status.reason.value}): {dict(status.evidence)}"
        green = test("green")
    if green.verdict is not Verdict.FIXED:
        return CellVerdict.UNREPAIRED, f"patched, the self-test says {green.verdict.value}{suffix}"
    reverted = test("red again")
    if reverted.verdict is not Verdict.REPRODUCED:
        return CellVerdict.ERROR, f"after revert, the self-test says {reverted.verdict.value}{suffix}"
    return CellVerdict.PROVEN, ""


def imported(name: str) -> ModuleType | None:
    """Import a module, or return None if this TRL does not have it. An error inside the module is not caught."""
    steps = name.split(".")
    for depth in range(1, len(steps) + 1):
        if find_spec(".".join(steps[:depth])) is None:
            return None
    return import_module(name)


def runnable(targets: Iterable[Target]) -> tuple[Target, ...]:
    """Return the targets whose modules can be imported beside the libraries that are installed."""
    return tuple(target for target in targets if _is_importable(target.module))


# A second attempt would import again what the first one has imported before it failed.
@cache
def _is_importable(name: str) -> bool:
    try:
        imported(name)
    except ImportError as error:
        if _is_of_a_library(error):
            return False
        raise
    return True


def _is_of_a_library(error: ImportError) -> bool:
    """Return whether a library that is installed, other than TRL, lacks a name that is imported from it."""
    package = (error.name or "").partition(".")[0]
    return not isinstance(error, ModuleNotFoundError) and package not in ("", "trl", "trl_hotfix")


def _attribute_of(module: ModuleType, path: str) -> Any:
    """Return the attribute at a dotted path, or None if the module does not have it."""
    value: Any = module
    for step in path.split("."):
        value = getattr(value, step, None)
    return value


def main(arguments: Sequence[str]) -> None:
    out, *ids = arguments
    names = packs.named(None, os.environ)
    with Path(out).open("w", encoding="utf-8") as file:
        for patch in loading.known(names):
            if not ids or patch.id in ids:
                # Each line is written at once: the waiting process sees the progress, and the results before a crash.
                print(json.dumps(verify(patch).to_dict()), file=file, flush=True)
