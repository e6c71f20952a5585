"""The mutants of patches: how many ways to be wrong the self-test, the proof and the tests of a patch notice.

    python -m bench.mutants some-id ...

They run on the first release that has the bug, on the newest one, on the newest that has a target which neither of
these has, and on those that a proof names as ``MUTANTS_ON``. A mutant is killed if it is noticed on one of them, since
some code is for one of them alone. A breakage that changes nothing in any run is no mutant. What was counted is
recorded in ``evidence/``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from trl_hotfix.catalogue import loading, modules
from trl_hotfix.model import Patch

from bench.mutants import covered
from bench.mutants.code_mutants import code_mutants, noting_gradients
from bench.proving import patch_tests, proofs
from bench.proving.running import Case, in_parallel, process
from bench.releases import layout
from bench.releases.layout import Place
from bench.results import evidence, keys

GOAL = 0.95
GENERATION = 1
"""It is raised when other mutants are made, or judged otherwise: then those of all patches are to be counted again."""


@dataclass
class Mutants:
    """The mutants of one patch, by what has killed them. ``equivalent`` has the reason of each that cannot be.

    ``branches`` are the lines and branches of its wrappers, without a mutant; ``missed`` those that nothing reaches.
    """

    patch: str
    killed: dict[str, str] = field(default_factory=dict)
    survived: list[str] = field(default_factory=list)
    equivalent: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    branches: int = 0
    missed: list[str] = field(default_factory=list)

    @property
    def total(self) -> int:
        """The mutants that are not equivalent."""
        return len(self.killed) + len(self.survived)

    def problems(self) -> Iterator[str]:
        yield from self.failures
        if self.total and len(self.killed) < GOAL * self.total:
            yield f"{len(self.killed)} of {self.total} mutants are killed: expected {GOAL:.0%}"
        yield from (f"no run reaches {branch}" for branch in self.missed)


def places_of(patch: Patch) -> list[Place]:
    """Return the first and the newest place that has the bug, and for a target of neither the newest that has it.

    A proof adds the releases in between of which a part of the wrapper is: ``MUTANTS_ON = ("0.20.0",)``.
    """
    chosen, of_proof = layout.first_and_newest(patch), proofs.settings_of(patch).get("MUTANTS_ON", ())
    named = [layout.main_place(release) for release in of_proof]
    for target in reversed(patch.targets):
        if not any(target in place.targets_of(patch) for place in [*chosen, *named]):
            chosen.append([place for place in layout.places() if target in place.targets_of(patch)][-1])
    return list(dict.fromkeys([*chosen, *named]))


def functions_of(patch: Patch) -> set[str]:
    """Return the functions of the patch's module that its wrappers use, themselves among them."""
    name = modules.module_of(patch.id)
    wrappers = dict.fromkeys(target.wrapper for target in patch.targets)
    used = keys.SOURCES.closure([(name, wrapper) for wrapper in wrappers])
    return {piece for module, piece in used if module == name}


def source_of(patch: Patch) -> str:
    """Return the source of the patch's module."""
    file = (layout.CHECKOUT / Path(*modules.module_of(patch.id).split("."))).with_suffix(".py")
    return file.read_text(encoding="utf-8")


def sources_of(patch: Patch) -> dict[str, str]:
    """Return the mutants of the patch's module, in what its wrappers use there."""
    return {mutant.name: mutant.source for mutant in code_mutants(source_of(patch), functions_of(patch))}


def run(
    patch: Patch, place: Place, code: Mapping[str, str], killed: Collection[str], *, branches: bool
) -> Mapping[str, Any] | str:
    """Return the answer about each mutant in a place, or why there is none. Those in ``killed`` are not made.

    ``branches``: find out which branches are reached, too. That takes one run more.
    """
    functions = functions_of(patch)
    task = {
        "patch": patch.id,
        "code": code,
        "killed": sorted(killed),
        "noting gradients": noting_gradients(source_of(patch), functions),
        "functions": sorted(functions),
        "branches": branches,
        "targets": [target.name for target in place.targets_of(patch)],
        "fixed": _gradients_of_fixed(patch, place),
    }
    with _task_file(task) as file:
        command = ["-m", "bench.mutants.mutated", "{out}", file]
        return process(place, command, 3600, *proofs.overlays_of(patch, place), "coverage", "pytest")


@contextlib.contextmanager
def _task_file(task: Mapping[str, Any]) -> Iterator[str]:
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        file.write(json.dumps(task))
        file.flush()
        yield file.name


def _gradients_of_fixed(patch: Patch, place: Place) -> str | None:
    """Return the file with the gradients of the first fixed release, if they are kept and can be compared."""
    if not patch.upstream.fixed_in or not proofs.has_parity(patch, place.release):
        return None
    # Those of the same stack if possible, as in ``proofs.parity``: another one may round otherwise in bfloat16.
    fixed_on = sorted(layout.places([patch.upstream.fixed_in]), key=lambda fixed: fixed.stack != place.stack)
    files = [proofs.gradients_of(patch, fixed) for fixed in fixed_on]
    return next((str(file) for file in files if file.is_file()), None)


def _misses(answers: Iterable[Mapping[str, Any] | str]) -> bool:
    """Return whether a branch is reached in none of these places, as far as is known."""
    reached = [answer[""].get("reached") for answer in answers if not isinstance(answer, str)]
    known = [found for found in reached if found and not isinstance(found, str)]
    return not known or bool(covered.together(known)["missed"])


def mutants_of(patch: Patch, answers: Mapping[Place, Mapping[str, Any] | str]) -> Mutants:
    """Return what became of the mutants of ``patch``."""
    found = Mutants(patch.id)
    declared = dict(proofs.settings_of(patch).get("EQUIVALENT", {}))
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    reached: list[Mapping[str, Any]] = []
    for place, answer in answers.items():
        if isinstance(answer, str):
            found.failures.append(f"{place}: {answer}")
            continue
        probed = answer[""]
        if probed["killer"]:
            found.failures.append(f"{place}: without a mutant, the {probed['killer']} says: {probed['why']}")
        elif isinstance(probed["reached"], str):
            found.failures.append(f"{place}: the branches were not counted: {probed['reached']}")
        elif probed["reached"]:
            reached.append(probed["reached"])
        for name, judged in answer.items():
            if name:
                by_name.setdefault(name, []).append(judged)
    branches = covered.together(reached)
    found.branches, found.missed = branches["total"], branches["missed"]
    for name, judgements in by_name.items():
        killers = [judged["killer"] for judged in judgements if judged["killer"]]
        if killers:
            found.killed[name] = killers[0]
        elif name in declared:
            found.equivalent[name] = declared.pop(name)
        elif any(judged.get("had effect", True) for judged in judgements):  # A mistake in the code always has one.
            found.survived.append(name)
    found.failures += [f"EQUIVALENT has {name!r}, which is killed, or is no mutant" for name in declared]
    return found


def report(found: Mutants) -> Iterator[str]:
    """Give a line of counts, then a line for each mutant that has survived."""
    counts = Counter(found.killed.values()).most_common()
    killers = ", ".join(f"{count} by {killer}" for killer, count in counts)
    yield (
        f"{found.patch}: {found.total} mutants, {len(found.killed)} killed ({killers}), "
        f"{len(found.equivalent)} equivalent; "
        f"{found.branches - len(found.missed)} of {found.branches} lines and branches reached"
    )
    yield from (f"  survived: {name}" for name in found.survived)


def key_of(patch: Patch) -> str:
    """Return the key of what a count depends on: patch, proof and tests, the places, and what is equivalent.

    What many patches share is not in it: a change there does not change which mistakes in one of them are noticed.
    """
    declared = proofs.settings_of(patch).get("EQUIVALENT", {})
    # A patch of a pack has none.
    files = filter(Path.is_file, [patch_tests.file_of(patch.id)])
    tests = [keys.tree_of(keys.parse(_without_families(file.read_text(encoding="utf-8")))) for file in files]
    places = [str(place) for place in places_of(patch)]
    return keys.digest_of([GENERATION, keys.own_key(patch), places, declared, *tests])


def _without_families(text: str) -> str:
    """Return the text of a test as if all patches were in one folder: a module may move to another family."""
    return re.sub(rf"\btrl_hotfix\.patches\.({'|'.join(modules.families())})\b", "trl_hotfix.patches", text)


def stale(patches: Iterable[Patch]) -> list[Patch]:
    """Return the patches whose count on record is of another patch or proof."""
    return [patch for patch in patches if evidence.load(patch.id)["mutants"] is not None and not is_current(patch)]


def is_current(patch: Patch) -> bool:
    """Return whether a count is on record, and of the present patch, proof and tests."""
    count = evidence.load(patch.id)["mutants"]
    return count is not None and count["key"] == key_of(patch)


def count(
    patches: Sequence[Patch], jobs: int, console: Console, ended: Callable[[Patch, Mutants], None] = lambda *_: None
) -> list[Mutants]:
    """Make and judge the mutants of these patches. ``ended`` is called with each result, since all take long."""
    work = [(patch, place) for patch in patches for place in places_of(patch)]
    layout.build({place for _, place in work}, console.print)
    # The mutants are compared with the fixed release too.
    cases = [Case(*case) for case in work]
    proofs.run([case for case in proofs.with_fixed_release(cases) if case not in cases], jobs, console)
    code = {patch.id: sources_of(patch) for patch in patches}

    def judged(patch: Patch) -> Iterable[tuple[str, Mutants]]:
        answers: dict[Place, Mapping[str, Any] | str] = {}
        killed: set[str] = set()
        missed = True
        for place in places_of(patch):
            answers[place] = answer = run(patch, place, code[patch.id], killed, branches=missed)
            if not isinstance(answer, str):
                killed |= {name for name, one in answer.items() if name and one["killer"]}
                missed = missed and _misses(answers.values())
        found = mutants_of(patch, answers)
        ended(patch, found)
        return [(patch.id, found)]

    found = dict(in_parallel("mutants, by patch", list(patches), judged, jobs, console))
    return [found[patch.id] for patch in patches]


def record_of(patch: Patch, found: Mutants) -> dict[str, Any]:
    """Return what is recorded: the counts, and by name what has survived and what is equivalent."""
    return {
        "key": key_of(patch),
        "places": [str(place) for place in places_of(patch)],
        "total": found.total,
        "killed": len(found.killed),
        "survived": sorted(found.survived),
        "equivalent": dict(sorted(found.equivalent.items())),
        "branches": found.branches,
        "missed": found.missed,
    }


def counted(patches: Sequence[Patch], jobs: int, console: Console, *, write: bool) -> list[str]:
    """Count the mutants of these patches, print and record them. Return what is wrong, a line each."""
    if not patches:
        return []
    failures = []

    def record(patch: Patch, found: Mutants) -> None:
        if write and not found.failures:
            evidence.write_mutants(patch, record_of(patch, found))

    for patch, found in zip(patches, count(patches, jobs, console, record), strict=True):
        for line in report(found):
            console.print(line, markup=False, soft_wrap=True)
        failures += [f"{patch.id}: {problem}" for problem in found.problems()]
    return failures


@click.command()
@click.argument("ids", nargs=-1)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count(), show_default=True)
@click.option("--write/--no-write", default=True, help="Record the counts.")
def main(ids: Sequence[str], jobs: int, write: bool) -> None:
    """Break the wrappers of these patches, by default of all, and list what nothing notices."""
    known = {patch.id: patch for patch in loading.load()}
    unknown = set(ids) - known.keys()
    if unknown:
        raise click.BadParameter(f"unknown patch {', '.join(sorted(unknown))}; `--list` of trl_hotfix shows them")
    failures = counted([known[patch_id] for patch_id in ids or known], jobs, Console(), write=write)
    for line in failures:
        click.echo(f"FAILED: {line}")
    sys.exit(1 if failures else 0)
