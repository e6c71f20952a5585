"""Make the pages of the catalogue: a page for each bug, and a table of all bugs.

Everything is read from ``patches.yaml``, the docstrings of the patches' modules, ``evidence/`` and the results of the
benchmarks, so that a new patch gets its page. The texts are in ``templates/``.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import yaml
from packaging.version import Version

from trl_hotfix.catalogue import loading, on_record
from trl_hotfix.matching import fingerprints
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Bug, KnownBug, Patch, Severity, Target
from trl_hotfix.reporting.sentences import fixed_in_layers, harm_in_words, links

from bench.results import gpu_record
from bench.results.matrix import matrix
from tools.pages import cost_pages, drawings, old_runs, release_pages, trainer_groups
from tools.pages.markdown import docstring, escaped, from_docstring, prose

SEVERITY_MEANINGS = {
    Severity.WRONG_GRADIENT: "a wrong gradient trains the model",
    Severity.WRONG_LOSS: "the loss is wrong, and what it trains",
    Severity.DATA_LOSS: "TRL trains on data twice, or never",
    Severity.WRONG_METRIC: "training is right and a logged number is wrong",
    Severity.CRASH: "the run fails",
    Severity.WASTED_COMPUTE: "the result is right and costs more than it should",
    Severity.DIAGNOSIS: "no number changes; a line in the log says what is wrong",
}
PRONOUN = re.compile(r"(It|Its|They|Their|These|This|That|Those|Both)\b")


def pages() -> dict[str, str]:
    """Return the pages as Markdown, by path within the site."""
    worst_first = list(Severity).index
    patches = sorted(loading.load(), key=lambda patch: (worst_first(patch.severity), trainers(patch), patch.id))
    known = sorted(loading.without_repair(), key=lambda bug: (worst_first(bug.severity), bug.id))
    by_severity = {severity: [patch for patch in patches if patch.severity is severity] for severity in Severity}
    present = {severity: bugs for severity, bugs in by_severity.items() if bugs}
    index = rendered("index.md", patches=patches, by_severity=present, meanings=SEVERITY_MEANINGS, known=known)
    return {
        "bugs/index.md": index,
        "bugs/checks.md": _checks(patches),
        "bugs/costs.md": cost_pages.table(patches),
        "bugs/releases.md": release_pages.table(),
        **{f"bugs/{patch.id}.md": _page(patch) for patch in patches},
        **{f"bugs/{bug.id}.md": _page_without_repair(bug) for bug in known},
    }


def nav() -> list[Any]:
    """Return the pages as a tree, by trainer. Those that newer releases have come first."""
    by_group = [
        {group: [{bug.id: f"bugs/{bug.id}.md"} for bug in bugs]} for group, bugs in trainer_groups.by_group().items()
    ]
    return [
        "bugs/index.md",
        {"By trainer and release": "bugs/releases.md"},
        {"How well they are checked": "bugs/checks.md"},
        {"What they cost": "bugs/costs.md"},
        *by_group,
    ]


def rendered(template: str, **values: Any) -> str:
    """Return a page. Blocks that stay empty leave no lines."""
    text = _templates().get_template(f"{template}.jinja").render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n"


@functools.cache
def _templates() -> jinja2.Environment:
    # Markdown, which `prose` and `escaped` make safe: HTML would be escaped twice.
    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")), trim_blocks=True, lstrip_blocks=True
    )
    templates.filters |= {
        "bodies_with_a_proof": _bodies_with_a_proof,
        "buggy_bodies": _buggy_bodies,
        "escaped": escaped,
        "first_numbers": _first_numbers,
        "number": lambda value: drawings.number(None if isinstance(value, jinja2.Undefined) else value),
        "parts": lambda run: parts(run).items(),
        "prose": prose,
        "releases": _releases,
        "share": _share,
        "trainers": trainers,
        "trainers_hit": _trainers_hit,
    }
    return templates


def trainers(patch: Patch) -> str:
    """Return the trainers with wrapped methods, such as ``DPO, KTO``, or the name of a wrapped function."""
    return ", ".join(dict.fromkeys(_trainer(target) for target in patch.targets))


def _trainer(target: Target) -> str:
    module = target.module.rpartition(".")[2]
    if module.endswith("_trainer"):
        names = {"online_dpo": "Online DPO", "nash_md": "Nash-MD", "distillation": "Distillation"}
        name = module.removesuffix("_trainer")
        return names.get(name, name.upper())
    return target.attribute.partition(".")[0]


def _trainers_hit(bug: Bug) -> str:
    return "any trainer" if "*" in trainer_groups.trainers_of(bug) else ", ".join(trainer_groups.trainers_of(bug))


def _checks(patches: Sequence[Patch]) -> str:
    """Return the table of what all checks of each patch notice together, and what they reach."""
    counted = {patch.id: matrix()["mutants"][patch.id] for patch in patches if patch.id in matrix()["mutants"]}
    total, killed = (sum(counts[name] for counts in counted.values()) for name in ("total", "killed"))
    by_id = sorted(patches, key=lambda patch: patch.id)
    return rendered("checks.md", patches=by_id, counted=counted, total=total, killed=killed)


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g} %" if whole else ""


def _buggy_bodies(patch: Patch, target: Target) -> set[str]:
    """Return the distinct bodies with the bug that a target has in its range."""
    known = fingerprints.bodies_for(patch.id)
    releases = (release for release in matrix()["releases"] if in_range(release, patch.range_of(target)))
    bodies = {known.at(target.name, release) for release in releases}
    return {body for body in bodies if body and known.verdict(patch.id, target.name, body) == "buggy"}


def _bodies_with_a_proof(patch: Patch) -> tuple[int, int]:
    """Return how many distinct bodies with the bug are trained with in a proof, and how many there are."""
    known = fingerprints.bodies_for(patch.id)
    proofs = (proof for proof in matrix()["proofs"] if proof["patch"] == patch.id)
    releases = {proof["release"] for proof in proofs if proof["verdict"] == "proven"}
    buggy = {(target.name, body) for target in patch.targets for body in _buggy_bodies(patch, target)}
    proven = {(target.name, known.at(target.name, release)) for target in patch.targets for release in releases}
    return len(buggy & proven), len(buggy)


def _page_without_repair(bug: KnownBug) -> str:
    return rendered(
        "known.md", bug=bug, facts=_facts(bug), lead=_lead(bug), old_run="\n\n".join(old_runs.section(bug, prose))
    )


def _page(patch: Patch) -> str:
    cells, proofs, parity = (
        [entry for entry in matrix()[kind] if entry["patch"] == patch.id] for kind in ("cells", "proofs", "parity")
    )
    by_release = sorted(proofs, key=lambda proof: Version(proof["release"]))
    proven = [proof for proof in by_release if proof["verdict"] == "proven"]
    curve = matrix()["curves"].get(patch.id)
    if curve is not None and curve["revision"] != patch.revision:
        curve = None
    return rendered(
        "bug.md",
        bug=patch,
        facts=_facts(patch),
        lead=_lead(patch),
        old_run="\n\n".join(old_runs.section(patch, prose)),
        in_the_code="\n\n".join(_in_the_code(patch)),
        evidence=on_record.in_words(patch),
        plot=_plot(patch, proven, curve),
        strip=drawings.strip(matrix()["releases"], cells),
        proofs=proofs,
        proven=proven,
        unaffected=list(dict.fromkeys(proof["release"] for proof in proven if "unaffected" in proof["runs"])),
        curve=curve,
        mutants=matrix()["mutants"].get(patch.id),
        parity=parity,
    )


def _in_the_code(patch: Patch) -> Iterator[str]:
    """Yield the docstring of the patch's module without its first paragraph, which says what you see once more."""
    said = {*_sentences(prose(patch.why)), *_sentences(prose(patch.how))}
    first, *rest = (_without_sentences(block, said) for block in from_docstring(docstring(patch)))
    # What goes on with a pronoun needs the paragraph before it.
    if rest and PRONOUN.match(rest[0]):
        rest.insert(0, first)
    yield from filter(None, rest)


def _without_sentences(block: str, said: set[str]) -> str:
    """Return a paragraph without the sentences that are said elsewhere. Lists and formulas stay as they are."""
    if block.startswith(("```", "- ")) or not said & {*_sentences(block)}:
        return block
    return " ".join(sentence for sentence in _sentences(block) if sentence not in said)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)


def _lead(bug: Bug) -> str:
    """Return what a reader asks first: what kind of harm, who is hit, and how to be rid of it."""
    harm = [
        f"{said[0].upper()}{said[1:]}" for said in (SEVERITY_MEANINGS[bug.severity], harm_in_words(bug.harm)) if said
    ]
    beside = "".join(f", {name} `{specifiers}`" for name, specifiers in bug.requires.items())
    arguments = "" if bug.severity is Severity.DIAGNOSIS else " ([which runs](#your-old-run))"
    return rendered(
        "lead.md",
        harm=". ".join(harm),
        hit=f"{_trainers_hit(bug)} on TRL {_releases(bug.trl)}{beside}{arguments}",
        ways=list(_ways_out(bug)),
    )


def _ways_out(bug: Bug) -> Iterator[str]:
    """Yield each way to be rid of a bug: the repair, and the releases with a fix."""
    if isinstance(bug, Patch):
        switch = "TRL_HOTFIX=1" if bug.default else f"TRL_HOTFIX=1 TRL_HOTFIX_ONLY={bug.id}"
        yield f"`{switch}` {'names it' if bug.severity is Severity.DIAGNOSIS else 'repairs it'}"
    fixes = [f"TRL {bug.upstream.fixed_in} has the fix"] if bug.upstream.fixed_in else []
    fixes += [f"{name} {version} has the fix" for name, version in fixed_in_layers(bug).items()]
    yield from fixes or ["no release has a fix"]


def _facts(bug: Bug) -> str:
    patch = bug if isinstance(bug, Patch) else None
    papers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", f"{bug.why} {docstring(patch) if patch else ''}"))
    threads = [(url.split("/")[-2].replace("issues", "issue"), url.split("/")[-1], url) for url in links(bug.upstream)]
    fixed_in, review_by = bug.upstream.fixed_in, bug.review_by
    facts = {
        "severity": f"{bug.severity.value}: {SEVERITY_MEANINGS[bug.severity]}",
        "harm": harm_in_words(bug.harm) or "",
        "in": prose(trainers(patch)) if patch else _trainers_hit(bug),
        "bug of": bug.layer or "",
        "TRL": f"{_releases(bug.trl)} (`{bug.trl}`)" + (f", fixed in {fixed_in}" if fixed_in else ""),
        "open": f"in the newest release we checked; we check again by {review_by}" if review_by else "",
        "requires": ", ".join(f"{name} `{specifiers}`" for name, specifiers in bug.requires.items()),
        "fixed": ", ".join(f"{name} {version}" for name, version in fixed_in_layers(bug).items()),
        "upstream": ", ".join(f"[{kind} {number}]({url})" for kind, number, url in threads),
        "paper": ", ".join(f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in papers),
    }
    if patch:
        named = "`only=` names it" + (", or one of its options is chosen" if patch.options else "")
        facts["costs"] = cost_pages.line(patch)
        facts["GPU"] = gpu_record.in_words(patch.id, gpu_record.load())
        facts["mutants"] = _mutants_in_short(patch)
        facts["default"] = "" if patch.default else f"off: it goes on where {named}"
    return rendered("facts.md", facts=facts)


def _mutants_in_short(patch: Patch) -> str:
    counts = matrix()["mutants"].get(patch.id)
    if counts is None:
        return "not counted ([how we count](checks.md))"
    noticed = _share(counts["killed"], counts["total"])
    return f"we broke it in {counts['total']} ways: the checks notice {noticed} ([how we count](checks.md))"


def _releases(specifiers: str) -> str:
    """Return the first and the last release of a range, such as ``0.9.6 to 0.11.4``."""
    releases = [release for release in matrix()["releases"] if in_range(release, specifiers)]
    last = "" if len(releases) == 1 else f" to {releases[-1]}"
    return f'<span class="line">{releases[0]}{last}</span>'


def parts(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the results of a run by part: each trainer or kind of model that it trains, or one part without a name."""
    if "measured" in run:
        return {"": run}
    results = {key: value for key, value in run.items() if isinstance(value, Mapping) and "verdict" in value}
    return results or {"": run}


class Plot(NamedTuple):
    """A drawing, and the release whose runs it shows."""

    svg: str
    release: str
    curve: Mapping[str, Any] | None = None


def _plot(patch: Patch, proven: Sequence[Mapping[str, Any]], curve: Mapping[str, Any] | None) -> Plot | None:
    """Draw the losses of the log by step or, where none are on record, the number of the newest proof."""
    if curve is not None:
        runs = {name: run["losses"] for name, run in curve["runs"].items()}
        return Plot(drawings.curves(runs), curve["runs"]["unpatched"]["release"], curve)
    what = _measured().get(patch.id)
    if what is None or not proven:
        return None
    for proof in reversed(proven):
        red, green = (parts(proof["runs"][run]) for run in ("red", "green"))
        part = next((name for name, run in red.items() if _are_of_one_run(run, green.get(name, {}))), None)
        if part is not None:
            numbers = (red[part]["measured"], green[part]["measured"], green[part]["right"])
            return Plot(drawings.bars(f"{what}{', ' * bool(part)}{part}", *numbers), proof["release"])
    return None


def _are_of_one_run(red: Mapping[str, Any], green: Mapping[str, Any]) -> bool:
    """Return whether both numbers should be the same. They differ where a proof has measured another batch."""
    if "measured" not in red or "measured" not in green:
        return False
    return math.isclose(red["right"], green["right"], rel_tol=0.01)


@functools.cache
def _measured() -> dict[str, str]:
    """Return what the number of a proof is, by patch."""
    kinds: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("measured.yaml").read_text(encoding="utf-8"))
    return {patch_id: what for what, ids in kinds.items() for patch_id in ids}


def _first_numbers(proofs: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Any, str, Any, Any]]:
    """Yield each proof with its first part that has numbers, and this part's results without and with the patch."""
    for proof in sorted(proofs, key=lambda proof: (Version(proof["release"]), proof["stack"])):
        red, green = (parts(proof["runs"].get(run, {})) for run in ("red", "green"))
        part = next((name for name, result in red.items() if "measured" in result), "")
        yield proof, part, red.get(part, {}), green.get(part, {})
