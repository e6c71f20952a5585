"""Everything about one patch, in eleven lines that a reviewer can believe."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from packaging.version import Version
from rich.console import Console

from trl_hotfix.matching.gates import lacking
from trl_hotfix.model import Patch

from bench.mutants import counting as mutants
from bench.proving import cells, covering, proofs
from bench.proving.running import Answer
from bench.releases import layout
from bench.releases.layout import CHECKOUT, TESTS
from bench.results import evidence


def check(patch: Patch, jobs: int, console: Console) -> tuple[list[str], list[str]]:
    """Run what is not on record of ``patch``, its matrix tests and its mutants. Return the lines, and the failures."""
    layout.build_release_overlays(Path(sys.executable), console.print)
    layout.build(layout.places(), console.print)
    cell_answers = cells.run(cells.missing([patch], layout.places()), jobs, console)
    between = cells.missing_beneath([patch], layout.places())
    if between:
        layout.build({case.place for case in between}, console.print)
    evidence.write(patch, cell_answers, beneath=cells.run(between, jobs, console, share=False))
    missing = proofs.with_fixed_release(proofs.missing([patch], layout.places()))
    proof_answers = proofs.run(missing, jobs, console)
    evidence.write(patch, [], proof_answers, proofs.parity([patch], proof_answers))
    outcomes = matrix_tests(patch)
    survivors = mutants.counted([patch], jobs, console, write=True)
    record = evidence.load(patch.id)
    return list(lines(patch, record, outcomes)), [*failures(patch, record, outcomes), *survivors]


def matrix_tests(patch: Patch) -> Mapping[str, Counter[str]]:
    """Return the outcomes of the matrix tests of this patch, by file."""
    selections = {"test_variants": patch.id, "test_together": patch.id}
    for name, places in (("test_surroundings", covering.of_surroundings()), ("test_pickles", covering.of_pickles())):
        # There is none for a patch that requires what no stack has.
        place = next((place for place, ids in places.items() if patch.id in ids), None)
        if place is not None:
            selections[name] = f"{place.release} and {place.stack}"
    return {name.removeprefix("test_"): _outcomes(name, selection) for name, selection in selections.items()}


def _outcomes(name: str, selection: str) -> Counter[str]:
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", "--shard", "1/1", f"--junitxml={report}", "-k", selection]
        subprocess.run([*command, str(TESTS / "bench" / f"{name}.py")], cwd=CHECKOUT, capture_output=True, check=False)
        tests = ElementTree.parse(report).iter("testcase") if report.is_file() else ()
        return Counter(next((child.tag for child in test if child.tag in OUTCOMES), "passed") for test in tests)


OUTCOMES = ("failure", "error", "skipped")


def lines(patch: Patch, record: Answer, outcomes: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Give the eleven lines."""
    by_verdict = {kind: Counter(entry["verdict"] for entry in record[kind]) for kind in ("cells", "proofs")}
    runs = {(cell["stack"], cell["ran"]) for cell in record["cells"]}
    proposed = evidence.proposed_range(patch, record["cells"])
    yield f"{patch.id}, revision {patch.revision}, {patch.severity.value}: {patch.title}"
    agreement = "proposed by the self-tests" if proposed == patch.trl else f"the self-tests propose {proposed!r}"
    yield f"range       {patch.trl}: {agreement}"
    yield f"self-tests  {len(record['cells'])} places by {len(runs)} runs: {_counts(by_verdict['cells'])}"
    yield f"numbers     {_last_proven(record['cells'], lambda cell: next(iter(cell['leaves'].values())))}"
    yield f"bodies      {_bodies(record)}"
    yield f"proofs      {len(record['proofs'])} places: {_counts(by_verdict['proofs'])}"
    yield f"numbers     {_last_proven(record['proofs'], lambda proof: proof['runs'])}"
    yield f"parity      {_parity(record['parity'])}"
    yield f"unaffected  {_unaffected(record['proofs'])}; " + "; ".join(
        f"{name} {_counts(counts) or 'none'}" for name, counts in outcomes.items()
    )
    yield f"mutants     {_mutants(record['mutants'])}"
    yield f"not run     {_not_run(patch)}"


def failures(patch: Patch, record: Answer, outcomes: Mapping[str, Counter[str]]) -> Iterator[str]:
    """Give what is wrong, a line each."""
    for kind in ("cells", "beneath", "proofs"):
        for entry in record.get(kind, []):
            if entry["verdict"] not in ("proven", "absent"):
                yield f"{entry['verdict']} on {evidence.place_of(entry)}: {entry['why']}"
    if evidence.proposed_range(patch, record["cells"]) != patch.trl:
        yield f"trl: expected {evidence.proposed_range(patch, record['cells'])!r}, found {patch.trl!r}"
    for comparison in record["parity"]:
        if max(comparison["loss_difference"], comparison["gradient_difference"]) > 1e-6:
            yield f"{evidence.place_of(comparison)} differs from {comparison['fixed_release']} by more than 1e-6"
    for name, counts in outcomes.items():
        if counts["failure"] or counts["error"]:
            yield f"tests/bench/test_{name}.py: {_counts(counts)}"
    if not outcomes["variants"]:
        yield "tests/bench/test_variants.py: no test ran"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()))


def _last_proven(answers: Sequence[Answer], runs_of: Any) -> str:
    """Return the numbers of each run in the last release that is proven."""
    proven = [answer for answer in answers if answer["verdict"] == "proven"]
    if not proven:
        return "none: nothing is proven"
    last = max(proven, key=lambda answer: Version(answer["release"]))
    runs = (
        f"{name} {' '.join(_number(key, value) for key, value in run.items() if key in NUMBERS and value is not None)}"
        for name, run in runs_of(last).items()
    )
    return f"{evidence.place_of(last)}: {'; '.join(runs)}"


NUMBERS = ("measured", "right", "loss")


def _number(name: str, value: Any) -> str:
    return f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"


def _bodies(record: Answer) -> str:
    verdicts = Counter(
        known.get("is", "not reached") for by_body in record["bodies"].values() for known in by_body.values()
    )
    targets = len(record["bodies"])
    inherited = record.get("inherited", {}).values()
    beneath = Counter(verdict for known in inherited for verdict in known["is"].values())
    of_transformers = f"; {len(inherited)} inherited from transformers: {_counts(beneath)}" if inherited else ""
    return f"of {targets} target{'s' * (targets != 1)}: {_counts(verdicts) or 'none of TRL'}{of_transformers}"


def _parity(comparisons: Sequence[Answer]) -> str:
    if not comparisons:
        return "none: there is no fixed release to compare with, or the proof states that it differs"
    worst_loss, worst_gradient = (
        max(comparison[name] for comparison in comparisons) for name in ("loss_difference", "gradient_difference")
    )
    fixed = sorted({comparison["fixed_release"] for comparison in comparisons})
    gradients = max(comparison["gradients"] for comparison in comparisons)
    return (
        f"{len(comparisons)} places patched against {', '.join(fixed)}: loss within {worst_loss:.3g}, "
        f"{gradients} gradients within {worst_gradient:.3g}"
    )


def _unaffected(proofs_on_record: Sequence[Answer]) -> str:
    places = [evidence.place_of(proof) for proof in proofs_on_record if "unaffected" in proof["runs"]]
    return f"equal bit by bit in {len(places)} places" if places else "no run on record"


def _mutants(counts: Answer | None) -> str:
    if counts is None:
        return "not counted"
    return f"{counts['total']}: {counts['killed']} killed; {len(counts['equivalent'])} equivalent"


def _not_run(patch: Patch) -> str:
    """Return what the bench leaves out for this patch, each with its reason."""
    variants = proofs.settings_of(patch).get("VARIANTS", {})
    reasons = [variants] if isinstance(variants, str) else [f"{name}: {reason}" for name, reason in variants.items()]
    if patch.requires:
        count = sum(lacking(patch, place.versions_for(patch)) is not None for place in layout.places())
        needed = ", ".join(f"{name}{specifiers}" for name, specifiers in patch.requires.items())
        reasons.append(f"{count} places without {needed}")
    return "; ".join(["a GPU", *reasons])
