"""A new release of TRL, from its wheel to the files of a pull request (docs/new-release.md).

    python -m bench.releases.new_release 1.17.0

Ranges and ``fixed_in`` are edited where the bench is certain. Exit code 1: a person has to look at something.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from email.parser import HeaderParser
from pathlib import Path
from types import ModuleType

import click
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from rich.console import Console

from trl_hotfix.catalogue import loading
from trl_hotfix.catalogue.data_files import data_file, manifest
from trl_hotfix.matching import gates
from trl_hotfix.matching.sources import Release
from trl_hotfix.model import Patch

from bench.commands import counted
from bench.options import jobs_option
from bench.proving import cells, proofs
from bench.proving.running import GOOD, Answer, Case, process
from bench.relations import release as relations_of_release
from bench.relations.asking import trainers_option
from bench.releases import judgement, layout, release_report, yaml_edits
from bench.releases.judgement import EDITED, BodyChange, Judgement, State
from bench.releases.layout import BENCH, CHECKOUT, HERE, Place
from bench.releases.release_report import Findings, Step
from bench.results import evidence
from tools import config_defaults_record

RELEASES = HERE / "releases.yaml"


class Steps:
    """The steps of the command: each is announced when it begins, and timed."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.began = time.monotonic()

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a step. What is called with its result comes back."""
        began, results = time.monotonic(), [""]
        click.echo(f"[{began - self.began:5.0f} s] {name}")
        yield results.append
        self.steps.append(Step(name, results[-1], time.monotonic() - began))
        if results[-1]:
            click.echo(f"          {results[-1]}")


@dataclass(frozen=True)
class Answers:
    """The cells, the proofs and the comparisons of one patch."""

    cells: Sequence[Answer]
    proofs: Sequence[Answer]
    parity: Sequence[Answer] = ()


def forget(module: ModuleType) -> None:
    """Forget what a module has read of a file that is now edited."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


def checked(release: str) -> str:
    """Return the release before this one. Raises ``ClickException`` for what cannot be a new release."""
    try:
        version = Version(release)
    except InvalidVersion:
        raise click.ClickException(f"{release!r} is not a version; expected one such as 1.17.0") from None
    on_record = any(release in evidence.load(patch.id)["releases"] for patch in loading.load())
    if release in layout.releases() and on_record:
        raise click.ClickException(
            f"TRL {release} is known: releases.yaml lists it and evidence/ has it; "
            "`make evidence` runs what is not on record"
        )
    older = [known for known in layout.releases() if Version(known) < version]
    if not older:
        raise click.ClickException(
            f"TRL {release} is older than every release on record; the oldest is {layout.releases()[0]}"
        )
    return older[-1]


def lay_out(release: str) -> None:
    """Install the wheel from PyPI as an overlay. Raises ``ClickException`` if there is none."""
    BENCH.mkdir(exist_ok=True)
    try:
        layout.build_overlay(release, (f"trl=={release}",), python=Path(sys.executable), report=click.echo)
    except RuntimeError as error:
        shutil.rmtree(BENCH / "overlay" / release, ignore_errors=True)
        reason = str(error).strip().splitlines()[-1].strip()
        raise click.ClickException(
            f"TRL {release} cannot be installed from PyPI; is it the right version? {reason}"
        ) from None


def places_of(release: str, before: str) -> list[Place]:
    """Return the release on the stacks of the release before, or on its own where releases.yaml lists it already."""
    listed = release if release in layout.releases() else before
    return [replace(place, release=release) for place in layout.places([listed])]


def check_imports(places: Sequence[Place], before: str, patches: Sequence[Patch], jobs: int) -> None:
    """Raise ``ClickException`` where a module with open bugs cannot be imported, with the requirements that are unmet.

    A module that could not be imported on this stack in the release ``before`` either is no reason.
    """
    targets = [target for patch in patches for target in gates.targets_for(patch, places[0].release)]
    modules = list(dict.fromkeys(target.module for target in targets))

    def errors_in(place: Place) -> dict[str, str] | str:
        errors = _import_errors(place, modules)
        known = _import_errors(replace(place, release=before), list(errors)) if isinstance(errors, dict) else {}
        return {name: errors[name] for name in errors if name not in known} if isinstance(errors, dict) else errors

    with ThreadPoolExecutor(jobs) as pool:
        for place, errors in zip(places, pool.map(errors_in, places), strict=True):
            if errors:
                name, error = ("trl", errors) if isinstance(errors, str) else next(iter(errors.items()))
                raise click.ClickException(_import_error(place, name, error))


def _import_errors(place: Place, modules: Sequence[str]) -> dict[str, str] | str:
    """Return the error of each module that cannot be imported in a place, or why there is no answer."""
    return process(place, ["-m", "bench.releases.import_modules", "{out}", *modules], 600) if modules else {}


def _import_error(place: Place, module: str, error: str) -> str:
    metadata = place.overlay / f"trl-{place.release}.dist-info" / "METADATA"
    unmet = unmet_requirements(metadata.read_text(encoding="utf-8"), place.version_of)
    reasons = unmet or ["the stack meets all requirements of its METADATA; see `special` in releases.yaml"]
    return "\n  ".join(
        [f"TRL {place.release} cannot be imported on the stack {place.stack}: {module}: {error}", *reasons]
    ) + (
        f"\nNothing has been changed. Put {place.release} into bench/releases/releases.yaml by hand, on stacks that "
        "meet its requirements, and run this again."
    )


def unmet_requirements(metadata: str, version_of: Callable[[str], str | None]) -> list[str]:
    """Return the requirements of a METADATA file, without those of extras, that a stack does not meet."""
    lines = HeaderParser().parsestr(metadata).get_all("Requires-Dist", [])
    requirements = [Requirement(line) for line in lines]
    unmet = []
    for requirement in requirements:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = version_of(canonicalize_name(requirement.name))
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            unmet.append(f"it requires {requirement}; the stack has {version or 'none'}")
    return unmet


def add_to_releases(release: str, before: str) -> None:
    if release not in layout.releases():
        text = RELEASES.read_text(encoding="utf-8")
        RELEASES.write_text(yaml_edits.with_release(text, before, release), encoding="utf-8")
        forget(layout)


def bodies_of(patch: Patch, before: str, release: str) -> dict[str, BodyChange]:
    return {
        # Where a class begins to define what it has inherited, its body changes.
        target.name: judgement.body_change(*(evidence.body_or_base(version, target) for version in (before, release)))
        for target in patch.targets
    }


def answers_by_patch(patches: Sequence[Patch], *kinds: Sequence[Answer]) -> dict[str, Answers]:
    return {
        patch.id: Answers(*([answer for answer in answers if answer["patch"] == patch.id] for answers in kinds))
        for patch in patches
    }


def with_the_range_checked(judged: Judgement, release: str, answers: Answers) -> Judgement:
    """Return the judgement, or one for a person where the range to declare is not the one that the cells propose."""
    if judged.state in judgement.FOR_A_PERSON:
        return judged
    patch = judged.patch
    declared = yaml_edits.ended(patch, release, judged.fixed_modules) if judged.state in EDITED else patch
    proposed = evidence.proposed_range(patch, [*evidence.load(patch.id)["cells"], *answers.cells])
    if declared.trl == proposed:
        return judged
    return replace(
        judged, state=State.UNCLEAR, why=f"the range would be {declared.trl}, the self-tests propose {proposed}"
    )


def edit_ranges(judgements: Sequence[Judgement], release: str) -> tuple[Patch, ...]:
    """End the ranges of what is fixed in ``patches.yaml``. Return the patches as they are declared now."""
    file = manifest()
    text = file.read_text(encoding="utf-8")
    for judged in judgements:
        if judged.state in EDITED:
            ended = yaml_edits.ended(judged.patch, release, judged.fixed_modules)
            text = yaml_edits.with_policy(text, judged.patch, ended)
    file.write_text(text, encoding="utf-8")
    forget(loading)
    edited = {judged.patch.id for judged in judgements if judged.state in EDITED}
    # A run that was interrupted has ended some already.
    return tuple(patch for patch in loading.load() if patch.id in edited or patch.upstream.fixed_in == release)


def proofs_again(patches: Sequence[Patch]) -> list[Case]:
    """Return the proofs that the new ranges change, and those whose gradients are compared with the fixed release."""
    compared = [patch for patch in patches if proofs.settings_of(patch).get("PARITY") and patch.upstream.fixed_in]
    cases = [*proofs.missing(patches, layout.places()), *proofs.planned(compared, layout.places())]
    return list({case.name: case for case in cases}.values())


def failures(patch: Patch, answers: Answers) -> Iterator[str]:
    """Give what is wrong after the edit."""
    for answer in [*answers.cells, *answers.proofs]:
        if answer["verdict"] not in GOOD:
            place = evidence.place_of(answer)
            yield f"`{patch.id}` on {place}, with the new range: {answer['verdict']}: {answer['why']}"
    for row in answers.parity:
        difference = max(row["loss_difference"], row["gradient_difference"])
        if difference > 1e-6:
            yield f"`{patch.id}`: {row['release']} patched and {row['fixed_release']} differ by {difference:.3g}"
    if patch.upstream.fixed_in and not proofs.settings_of(patch).get("PARITY"):
        proof = layout.proof_file(patch.id).relative_to(layout.CHECKOUT)
        yield (
            f"`{patch.id}`: {proof} has no PARITY = True, so no comparison with {patch.upstream.fixed_in}; "
            f"set it if the two can be compared, and run `make evidence PATCHES={patch.id}`"
        )


def record(patch: Patch, answers: Answers) -> str | None:
    """Write the evidence of a patch. Return the reason if it contradicts what is on record."""
    try:
        evidence.write(patch, answers.cells, answers.proofs, answers.parity)
    except ValueError as error:
        return str(error)
    return None


def verdicts(answers: Answers) -> str:
    """Return the verdicts of a patch in the new release, by stack."""
    lines = []
    for kind, entries in (("self-test", answers.cells), ("proof", answers.proofs)):
        stacks: dict[str, list[str]] = {}
        for entry in entries:
            stacks.setdefault(entry["verdict"], []).append(entry["stack"])
        lines += [f"{kind} {verdict} ({', '.join(names)})" for verdict, names in stacks.items()]
    return "<br>".join(lines)


def prepare(release: str, before: str, patches: Sequence[Patch], jobs: int, steps: Steps) -> list[Place]:
    """Lay everything out and list the release. Return its places. Nothing is edited where TRL cannot be imported."""
    with steps.step("stacks, and the wheels of all releases"):
        lay_out(release)
        places = places_of(release, before)
        layout.build([replace(place, release=before) for place in places], click.echo)
        layout.build_release_overlays(Path(sys.executable), click.echo)
    with steps.step("evidence of the older releases"):
        missing = cells.missing(patches, [place for place in layout.places() if place.release != release])
        if missing:
            raise click.ClickException(
                f"{len(missing)} self-tests on older releases are not on record, such as that of {missing[0].patch.id} "
                f"on {missing[0].place}; run `make evidence` first"
            )
    with steps.step("imports") as result:
        check_imports(places, before, patches, jobs)
        add_to_releases(release, before)
        result(f"TRL {release} imports on {', '.join(place.stack for place in places)}")
    return places


def judgements_on(
    release: str, before: str, patches: Sequence[Patch], answers: Mapping[str, Answers], steps: Steps
) -> list[Judgement]:
    with steps.step("bodies of the targets") as result:
        bodies = {patch.id: bodies_of(patch, before, release) for patch in patches}
        by_target = {name: change for changes in bodies.values() for name, change in changes.items()}
        changes = [change.value for change in by_target.values()]
        result(", ".join(f"{changes.count(change)} {change}" for change in dict.fromkeys(changes)))
    with steps.step("judgement") as result:
        judged = []
        for patch in patches:
            seen = answers[patch.id]
            entry = judgement.judge(patch, release, bodies[patch.id], seen.cells, seen.proofs)
            judged.append(with_the_range_checked(entry, release, seen))
        result(release_report.counts(judged))
    return judged


def new_release(release: str, trainers: Sequence[str], jobs: int) -> Findings:
    """Run every patch and the relations on a new release, edit what is certain and write the evidence.

    Raises ``ClickException``.
    """
    console, steps = Console(), Steps()
    before, patches = checked(release), loading.load()
    places = prepare(release, before, patches, jobs, steps)
    with steps.step("self-tests") as result:
        cell_answers = cells.run(cells.missing(patches, places), jobs, console)
        result(counted(cell_answers))
    with steps.step("proofs") as result:
        proof_answers = proofs.run(proofs.missing(patches, places), jobs, console)
        result(counted(proof_answers))
    answers = answers_by_patch(patches, cell_answers, proof_answers)
    judged = judgements_on(release, before, patches, answers, steps)
    shown = {patch.id: verdicts(answers[patch.id]) for patch in patches}
    findings = Findings(release, before, [place.stack for place in places], judged, shown, steps=steps.steps)
    with steps.step("ranges of what is fixed") as result:
        edited = edit_ranges(judged, release)
        result(", ".join(patch.id for patch in edited) or "none")
    with steps.step("self-tests, proofs and parity of what is fixed") as result:
        cell_answers = cells.run(cells.missing(edited, layout.places()), jobs, console)
        proof_answers = proofs.run(proofs_again(edited), jobs, console)
        compared = []
        for patch in edited:
            try:
                compared += proofs.parity([patch], proof_answers)
            except ValueError as error:
                findings.to_do.append(f"no parity: {error}")
        answers |= answers_by_patch(edited, cell_answers, proof_answers, compared)
        result(f"{counted(cell_answers)}; proofs: {counted(proof_answers)}; {len(compared)} comparisons")
    # With the ranges as they are now, or the answers would not be known afterwards; before the evidence is on record,
    # which ends this command: it may be interrupted here, and goes on.
    with steps.step("relations") as result:
        findings.relations = relations_of_release.asked(release, before, trainers, jobs, console)
        result(str(findings.relations))
    with steps.step("evidence"):
        for patch in loading.load():
            contradiction = record(patch, answers[patch.id])
            findings.to_do += [f"`{patch.id}`: its evidence is not written: {contradiction}"] if contradiction else []
        for patch in edited:
            findings.to_do += failures(patch, answers[patch.id])
    return findings


def edits(texts: Mapping[Path, str]) -> str:
    """Return the unified diff of files that had these texts."""
    lines = []
    for file, text in texts.items():
        name = file.relative_to(CHECKOUT)
        lines += release_report.diff(text, file.read_text(encoding="utf-8"), f"a/{name}", f"b/{name}", limit=None)
    return "\n".join(lines)


@click.command()
@click.argument("release", metavar="VERSION")
@trainers_option
@jobs_option
def main(release: str, trainers: tuple[str, ...], jobs: int) -> None:
    """Run every patch on a new release and ask TRAINERS the relations. Exit code 1: a person has to look."""
    texts = {file: file.read_text(encoding="utf-8") for file in (RELEASES, manifest())}
    findings = new_release(release, trainers, jobs)
    defaults = data_file("defaults.json")
    defaults.write_text(
        config_defaults_record.with_release(defaults.read_text(encoding="utf-8"), release), encoding="utf-8"
    )
    findings.edits = edits(texts)
    report = CHECKOUT / "build" / f"new-release-{release}.md"
    report.parent.mkdir(parents=True, exist_ok=True)
    old, new = (Release(BENCH / "overlay" / version) for version in (findings.before, release))
    report.write_text(release_report.markdown(findings, old, new), encoding="utf-8")
    click.echo(f"report: {report.relative_to(CHECKOUT)}")
    for line in findings.for_a_person:
        click.echo(f"for a person: {line}")
    sys.exit(1 if findings.for_a_person else 0)


if __name__ == "__main__":
    main()
