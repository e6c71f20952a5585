"""Make the pages of the catalogue: a page for each bug, and a table of all bugs.

Everything is read from ``patches.yaml``, the docstrings of the patches' modules, ``evidence/`` and the results of the
benchmarks, so that a new patch gets its page.
"""

from __future__ import annotations

import ast
import math
import re
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from packaging.version import Version

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "bench"))

import old_runs
import trainer_groups

from trl_hotfix.catalogue import loading, modules, on_record
from trl_hotfix.matching import fingerprints
from trl_hotfix.matching.versions import in_range
from trl_hotfix.model import Bug, KnownBug, Patch, Severity, Target
from trl_hotfix.reporting.sentences import links

import cost_pages
import gpu_record
import release_pages
from matrix import matrix

SEVERITY_MEANINGS = {
    Severity.WRONG_GRADIENT: "the model is trained by a wrong gradient",
    Severity.WRONG_LOSS: "the loss is wrong, and what is trained by it",
    Severity.DATA_LOSS: "data are trained on twice, or never",
    Severity.WRONG_METRIC: "training is right and a logged number is wrong",
    Severity.CRASH: "the run fails",
    Severity.WASTED_COMPUTE: "the result is right and costs more than it should",
    Severity.DIAGNOSIS: "nothing is changed; a line in the log says what is wrong",
}
MARKED = re.compile(
    r"""(?P<link> arXiv:(?P<paper>\d{4}\.\d{4,5}) | (?P<kind>[Pp]ull\ request|[Ii]ssue)\ (?P<number>\d+) )
    | (?<![\w.]) (?:
        [A-Za-z_]\w*(?:\.\w+)*=(?:"[^"]*"|\([^)]*\)|\w[\w.\-]*\w|\w)   # name=value
      | [A-Za-z_]\w*(?:\.\w+)*\((?:\w+=[^()]*)?\)                        # call(), call(with=it)
      | (?:[A-Za-z_]\w*\.)*(?:[A-Za-z]\w*)?_\w+(?:\.\w+)*                # has_underscores, of.its.own
      | [A-Z]\w+(?:Trainer|Config|Collator|Callback|Error)\b
    )""",
    re.VERBOSE,
)
"""Matches what is marked in a text: a paper, a thread of TRL's repository, and text that looks like code."""


def pages() -> dict[str, str]:
    """Return the pages as Markdown, by path within the site."""
    severities = list(Severity)
    patches = sorted(loading.load(), key=lambda patch: (severities.index(patch.severity), trainers(patch), patch.id))
    tables = {
        "bugs/index.md": _index(patches),
        "bugs/checks.md": _checks(patches),
        "bugs/costs.md": cost_pages.table(patches),
        "bugs/releases.md": release_pages.table(),
    }
    without_repair = {f"bugs/{bug.id}.md": _page_without_repair(bug) for bug in loading.without_repair()}
    return tables | {f"bugs/{patch.id}.md": _page(patch) for patch in patches} | without_repair


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


def _index(patches: Sequence[Patch]) -> str:
    lines = [
        "# The bugs",
        "",
        f"{len(patches)} bugs of TRL, the worst first. Each page has what you see when the bug hits you, what the "
        "patch does, and what is on record; [the matrix](../evidence/matrix.html) has every number, and [how well they "
        "are checked](checks.md) how many ways to break a patch are noticed, [what they cost](costs.md) the time and "
        "memory that they take; [by trainer and release](releases.md) counts them. *Open*: "
        "the newest release that was looked at still has the bug.",
    ]
    for severity in Severity:
        of_severity = [patch for patch in patches if patch.severity is severity]
        if of_severity:
            meaning = SEVERITY_MEANINGS[severity].capitalize()
            lines += ["", f"## {severity.value}", "", f"{meaning}: {len(of_severity)}.", ""]
            lines += ["| bug | in | TRL |", "|---|---|---|"]
        for patch in of_severity:
            name = f"[{prose(patch.title)}]({patch.id}.md)<br><small>`{patch.id}`</small>"
            lines.append(
                f"| {name} | {prose(trainers(patch))} | {_releases(patch.trl)}{', open' * bool(patch.review_by)} |"
            )
    return "\n".join([*lines, *_index_without_repair(), ""])


def _index_without_repair() -> Iterator[str]:
    severities = list(Severity)
    bugs = sorted(loading.without_repair(), key=lambda bug: (severities.index(bug.severity), bug.id))
    yield from ("", "## Known, no repair here", "")
    yield (
        f"{len(bugs)} more bugs. `scan`, `audit` and `compare` tell whether they hit you; nothing is applied. "
        "Their ranges were read from TRL's code, and are not proven by trainings."
    )
    yield from ("", "| bug | in | TRL |", "|---|---|---|")
    for bug in bugs:
        name = f"[{prose(bug.title)}]({bug.id}.md)<br><small>`{bug.id}`, {bug.severity.value}</small>"
        yield f"| {name} | {_trainers_hit(bug)} | {_releases(bug.trl)}{', open' * bool(bug.review_by)} |"


def _trainers_hit(bug: Bug) -> str:
    return "any trainer" if "*" in trainer_groups.trainers_of(bug) else ", ".join(trainer_groups.trainers_of(bug))


def _page_without_repair(bug: KnownBug) -> str:
    blocks = [
        f"# {_escaped(bug.title)}",
        f"`{bug.id}`: known, no repair here",
        _facts(bug),
        "## What you see",
        prose(bug.why),
        "## What you can do",
        _remedy(bug),
        *old_runs.section(bug, prose),
    ]
    return "\n\n".join(blocks) + "\n"


def _remedy(bug: KnownBug) -> str:
    fixed_in = bug.upstream.fixed_in
    upgrade = f"TRL {fixed_in} has it fixed. " if fixed_in else "No release of TRL has it fixed. "
    return f"{upgrade}`trl-hotfix scan train.py` tells whether a script is hit, and by which argument."


def _checks(patches: Sequence[Patch]) -> str:
    """Return the table of what all checks of each patch notice together, and what they reach."""
    counts = {patch.id: matrix()["mutants"][patch.id] for patch in patches if patch.id in matrix()["mutants"]}
    total, killed = (sum(count[name] for count in counts.values()) for name in ("total", "killed"))
    lines = [
        "# How well they are checked",
        "",
        "A check is worth what it notices. So each wrapper is broken in every way (`make mutants`): mistakes in its "
        "code, and breakages at run time, such as a repair of the first micro-batch alone, without a gradient, in "
        "training alone, or of the first row. The self-test, the tests and the proof of the patch have to notice it. "
        "A mutant is *equivalent* if no run can tell it from the patch; its page has the reason. *Reached*: the lines "
        "and branches of the wrapper that these checks run through. *Proofs*: the distinct bodies of the methods with "
        "the bug that a proof has trained with.",
        "",
        f"{len(counts)} of {len(patches)} patches are counted: {total} mutants, of which the checks "
        f"kill {_share(killed, total)}.",
        "",
        "| patch | mutants | killed | equivalent | reached | proofs |",
        "|---|---|---|---|---|---|",
    ]
    for patch in sorted(patches, key=lambda patch: patch.id):
        proven, bodies = _bodies_with_a_proof(patch)
        count = counts.get(patch.id)
        cells = ["not counted", "", "", ""]
        if count is not None:
            cells = [
                f"{count['total']}",
                _share(count["killed"], count["total"]),
                f"{len(count['equivalent'])}",
                _share(count["branches"] - len(count["missed"]), count["branches"]),
            ]
        lines.append(f"| [`{patch.id}`]({patch.id}.md) | {' | '.join(cells)} | {proven} of {bodies} |")
    return "\n".join([*lines, ""])


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.4g} %" if whole else ""


def _bodies_with_a_proof(patch: Patch) -> tuple[int, int]:
    """Return how many distinct bodies with the bug are trained with in a proof, and how many there are."""
    releases = {
        proof["release"] for proof in matrix()["proofs"] if proof["patch"] == patch.id and proof["verdict"] == "proven"
    }
    known = fingerprints.bodies_for(patch.id)
    buggy = {
        (target.name, body)
        for target in patch.targets
        for release in matrix()["releases"]
        if in_range(release, patch.range_of(target))
        for body in [known.at(target.name, release)]
        if known.verdict(patch.id, target.name, body) == "buggy"
    }
    proven = {(target.name, known.at(target.name, release)) for target in patch.targets for release in releases}
    return len(buggy & proven), len(buggy)


def _page(patch: Patch) -> str:
    blocks = [
        f"# {_escaped(patch.title)}",
        f"`{patch.id}`, revision {patch.revision}",
        _facts(patch),
        "## What you see",
        prose(patch.why),
        "## What the patch does",
        prose(patch.how),
        *(["## What is not repaired", prose(patch.not_repaired)] if patch.not_repaired else []),
        *_options(patch),
        *_switches(patch),
        *old_runs.section(patch, prose),
        *_in_the_code(patch),
        "## What it wraps",
        _targets(patch),
        "## What was seen",
        *_record(patch),
    ]
    return "\n\n".join(blocks) + "\n"


def _in_the_code(patch: Patch) -> Iterator[str]:
    """Yield the docstring of the patch's module without its first paragraph, which says what you see once more."""
    said = {*_sentences(prose(patch.why)), *_sentences(prose(patch.how))}
    first, *rest = (_without_sentences(block, said) for block in from_docstring(docstring(patch)))
    # What goes on with a pronoun needs the paragraph before it.
    if rest and re.match(r"(It|Its|They|Their|These|This|That|Those|Both)\b", rest[0]):
        rest.insert(0, first)
    if rest:
        yield "## In TRL's code"
        yield from filter(None, rest)


def _without_sentences(block: str, said: set[str]) -> str:
    """Return a paragraph without the sentences that are said elsewhere. Lists and formulas stay as they are."""
    if block.startswith(("```", "- ")) or not said & {*_sentences(block)}:
        return block
    return " ".join(sentence for sentence in _sentences(block) if sentence not in said)


def _sentences(text: str) -> list[str]:
    return re.split(r"(?<=[.!?])\s+(?=[A-Z`])", text)


def _facts(patch: Bug) -> str:
    notes = docstring(patch) if isinstance(patch, Patch) else ""
    papers = dict.fromkeys(re.findall(r"arXiv:(\d{4}\.\d{4,5})", f"{patch.why} {notes}"))
    upstream = [
        f"[{url.split('/')[-2].replace('issues', 'issue')} {url.split('/')[-1]}]({url})"
        for url in links(patch.upstream)
    ]
    facts = {
        "severity": f"{patch.severity.value}: {SEVERITY_MEANINGS[patch.severity]}",
        "in": prose(trainers(patch)) if isinstance(patch, Patch) else _trainers_hit(patch),
        "TRL": f"{_releases(patch.trl)} (`{patch.trl}`)"
        + (f", fixed in {patch.upstream.fixed_in}" if patch.upstream.fixed_in else ""),
        "open": f"in the newest release that was looked at; looked at again by {patch.review_by}"
        if patch.review_by
        else "",
        "requires": ", ".join(f"{name} `{specifiers}`" for name, specifiers in patch.requires.items()),
        "upstream": ", ".join(upstream),
        "paper": ", ".join(f"[arXiv:{paper}](https://arxiv.org/abs/{paper})" for paper in papers),
    }
    if isinstance(patch, Patch):
        facts["costs"] = cost_pages.line(patch)
        facts["GPU"] = gpu_record.in_words(patch.id, gpu_record.load())
        facts["mutants"] = _mutants_in_short(patch)
        facts["default"] = "" if patch.default else f"off: it goes on where {_named_by(patch)}"
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts.items() if value)
    return f"| | |\n|---|---|\n{rows}".rstrip()


def _named_by(patch: Patch) -> str:
    return "`only=` names it" + (", or one of its options is chosen" if patch.options else "")


def _options(patch: Patch) -> Iterator[str]:
    if patch.options:
        yield "## Options"
    for name, option in patch.options.items():
        choices = [
            f"- `{choice}`{' (the default)' if choice == option.default else ''}: {prose(meaning)}"
            for choice, meaning in option.choices.items()
        ]
        alternative = next(choice for choice in option.choices if choice != option.default)
        yield f"`{name}`:\n\n" + "\n".join(choices)
        yield _fenced("bash", f"TRL_HOTFIX_OPTIONS={patch.id}.{name}={alternative}")
        yield _fenced("python", f'trl_hotfix.apply(options={{"{patch.id}": {{"{name}": "{alternative}"}}}})')


def _switches(patch: Patch) -> Iterator[str]:
    if not patch.default:
        yield "## Turn it on"
        yield _fenced("bash", f"TRL_HOTFIX=1 TRL_HOTFIX_ONLY={patch.id}    # and no other; ids are separated by commas")
        yield _fenced("python", f'trl_hotfix.apply(only=["{patch.id}"])')
    yield "## Turn it off"
    yield _fenced("bash", f"TRL_HOTFIX_SKIP={patch.id}")
    yield _fenced(
        "python", f'trl_hotfix.apply(skip=["{patch.id}"])\ntrl_hotfix.revert("{patch.id}")    # while it runs'
    )


def _targets(patch: Patch) -> str:
    rows = ["| method | called | TRL | bodies with the bug |", "|---|---|---|---|"]
    known = fingerprints.bodies_for(patch.id)
    for target in patch.targets:
        bodies = {
            known.at(target.name, release)
            for release in matrix()["releases"]
            if in_range(release, patch.range_of(target)) and known.at(target.name, release) is not None
        }
        buggy = [body for body in bodies if known.verdict(patch.id, target.name, body) == "buggy"]
        name = f"`{target.attribute}`<br><small>`{target.module}`</small>"
        called = target.called.value if target.called is not None else ""
        rows.append(f"| {name} | {called} | {_releases(patch.range_of(target))} | {len(buggy)} |")
    return "\n".join(rows)


def _record(patch: Patch) -> Iterator[str]:
    releases = matrix()["releases"]
    cells, proofs, parity = (
        [entry for entry in matrix()[kind] if entry["patch"] == patch.id] for kind in ("cells", "proofs", "parity")
    )
    yield f"The self-test, red, green and red, on every release: {on_record.in_words(patch)}."
    yield _strip(releases, cells)
    proven = sorted(
        (proof for proof in proofs if proof["verdict"] == "proven"), key=lambda proof: Version(proof["release"])
    )
    if not proven:
        yield "No proof with the real trainer is on record."
    else:
        yield from _proof(proven[-1])
    curve = matrix()["curves"].get(patch.id)
    if curve is not None and curve["revision"] == patch.revision:
        yield from _curve(curve["runs"], curve["stack"])
    if len(proofs) > 1:
        yield _all_proofs(proofs)
    if unaffected := dict.fromkeys(proof["release"] for proof in proven if "unaffected" in proof["runs"]):
        yield (
            "A run that the bug does not hit has the same loss and gradients through the patched method as without the "
            f"patch, bit by bit: seen on {', '.join(unaffected)}."
        )
    if counts := matrix()["mutants"].get(patch.id):
        yield from _mutants(counts)
    if parity:
        yield "### Against the release with the fix"
        yield "The same weights, batch and seed; the patched release and the fixed one:"
        rows = ["| patched | fixed | loss differs by | gradients, at most by |", "|---|---|---|---|"]
        for pair in parity:
            worst = f"{number(pair['gradient_difference'])} ({pair['gradients']} gradients)"
            rows.append(
                f"| {pair['release']} | {pair['fixed_release']} | {number(pair['loss_difference'])} | {worst} |"
            )
        yield "\n".join(rows)


def _mutants_in_short(patch: Patch) -> str:
    counts = matrix()["mutants"].get(patch.id)
    if counts is None:
        return "not counted ([how they are](checks.md))"
    return (
        f"broken in {counts['total']} ways: the checks notice "
        f"{_share(counts['killed'], counts['total'])} ([how it is counted](checks.md))"
    )


def _mutants(counts: Mapping[str, Any]) -> Iterator[str]:
    """Give how many ways to break the wrapper are noticed, and which are not."""
    total = counts["total"]
    yield (
        f"The wrapper was broken in {total} ways: the checks notice {counts['killed']} of them. They reach "
        f"{counts['branches'] - len(counts['missed'])} of its {counts['branches']} lines and branches."
    )
    if counts["survived"]:
        yield "Not noticed:\n\n" + "\n".join(f"- {_as_code(name)}" for name in counts["survived"])
    if counts["equivalent"]:
        yield "No run can tell these from the patch:\n\n" + "\n".join(
            f"- {_as_code(name)}: {reason}" for name, reason in counts["equivalent"].items()
        )


def _as_code(name: str) -> str:
    """Return the name of a mutant as code, which may have backquotes in it."""
    return f"`` {name} ``"


def _strip(releases: Sequence[str], cells: Sequence[Mapping[str, Any]]) -> str:
    """Return a box for each release, in the colours of the matrix. The text above it has the same in words."""
    verdicts_of: dict[str, set[str]] = {}
    for cell in cells:
        verdicts_of.setdefault(cell["release"], set()).add(cell["verdict"])
    boxes = []
    for release in releases:
        verdicts = verdicts_of.get(release, {"not looked at"})
        # With another version of transformers the same release may be without the bug.
        worst = next((verdict for verdict in sorted(verdicts) if verdict not in ("absent", "proven")), "")
        word = worst or ("proven" if "proven" in verdicts else "absent")
        boxes.append(f'<i class="{word}" title="{release}: {" or ".join(sorted(verdicts))}"></i>')
    counts = Counter(word.partition('"')[0] for word in (box.removeprefix('<i class="') for box in boxes))
    words = ", ".join(f"{count} {word}" for word, count in counts.items())
    row = f'<div class="strip" role="img" aria-label="{words}">{"".join(boxes)}</div>'
    return f"{row}\n<small>{releases[0]} to {releases[-1]}: {words}</small>"


def _proof(proof: Mapping[str, Any]) -> Iterator[str]:
    yield f"### With the real trainer, TRL {proof['release']}"
    runs = {"red": "unpatched", "green": "patched", "red again": "reverted"}
    for part in parts(proof["runs"]["red"]):
        red, green = (parts(proof["runs"][run]).get(part, {}) for run in ("red", "green"))
        if "measured" in red and "measured" in green:
            yield bars(part, red["measured"], green["measured"], green["right"])
    rows = ["| | the proof says | measured | right | wrong | loss |", "|---|---|---|---|---|---|"]
    for run, run_name in runs.items():
        for part, result in parts(proof["runs"][run]).items():
            name = f"{run_name}{', ' * bool(part)}{prose(part)}"
            loss = result.get("loss", proof["runs"][run].get("loss") if not part else None)
            numbers = " | ".join(
                number(value) for value in (*(result.get(key) for key in ("measured", "right", "wrong")), loss)
            )
            reason = f": {prose(result['why'])}" if result.get("why") else ""
            rows.append(f"| {name} | {result['verdict']}{reason} | {numbers} |")
    yield "\n".join(rows)
    yield (
        "*Measured* is what the proof looks at; *right* and *wrong* are what it has to be without the bug and with it, "
        f"computed by the proof itself; *loss* is the first one of the trainer. Stack: `{proof['stack']}`."
    )


def parts(run: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the results of a run by part: each trainer or kind of model that it trains, or one part without a name."""
    if "measured" in run:
        return {"": run}
    results = {key: value for key, value in run.items() if isinstance(value, Mapping) and "verdict" in value}
    return results or {"": run}


def _all_proofs(proofs: Sequence[Mapping[str, Any]]) -> str:
    rows = ["| TRL | stack | verdict | unpatched | patched | right |", "|---|---|---|---|---|---|"]
    for proof in sorted(proofs, key=lambda proof: (Version(proof["release"]), proof["stack"])):
        red, green = (parts(proof["runs"].get(run, {})) for run in ("red", "green"))
        part = next((name for name, result in red.items() if "measured" in result), "")
        before, after = red.get(part, {}), green.get(part, {})
        verdict = proof["verdict"] + (f": {prose(before['why'])}" if before.get("why") else "")
        numbers = " | ".join(map(number, (before.get("measured"), after.get("measured"), before.get("right"))))
        verdict += f" ({prose(part)})" if part else ""
        rows.append(f"| {proof['release']} | {proof['stack']} | {verdict} | {numbers} |")
    table = "\n".join(rows)
    return f'<details markdown="1"><summary>All {len(proofs)} proofs on record</summary>\n\n{table}\n\n</details>'


def bars(part: str, before: Any, after: Any, right: Any) -> str:
    """Draw the values before, after and right as bars from 0.

    If the bars would have nearly the same length, they show the differences from the right value instead.
    """
    shown = {"unpatched": ("before", before), "patched": ("after", after), "right": ("right", right)}
    finite = [value for _, value in shown.values() if _is_number(value)]
    if not finite:
        return ""
    head = part
    if len(finite) == 3 and 0 < max(finite) - min(finite) < 0.15 * max(map(abs, finite)):
        shown = {name: (kind, value - right) for name, (kind, value) in shown.items() if name != "right"}
        finite = [value for _, value in shown.values()]
        head = f"{part}{', ' * bool(part)}measured - right"
    low, high = min(0, *finite), max(0, *finite)
    scale = 240 / (high - low or 1)
    top = 22 if head else 4
    shapes = [f'<text x="0" y="14">{escape(head)}</text>'] if head else []
    for row, (name, (kind, value)) in enumerate(shown.items()):
        y = top + 22 * row
        shapes.append(f'<text x="72" y="{y + 13}" text-anchor="end">{name}</text>')
        if _is_number(value):
            x, width = 80 + (min(0, value) - low) * scale, max(1, abs(value) * scale)
            shapes.append(f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="17" rx="2"/>')
        shapes.append(f'<text x="332" y="{y + 13}">{number(value)}</text>')
    zero, height = 80 - low * scale, top + 22 * len(shown)
    shapes.append(f'<line x1="{zero:.1f}" x2="{zero:.1f}" y1="{top - 2}" y2="{height - 3}"/>')
    words = ", ".join(f"{name} {number(value)}" for name, (_, value) in shown.items())
    label = escape(f"{head} {words}".strip())
    return f'<svg class="bars" viewBox="0 0 420 {height}" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _curve(runs: Mapping[str, Any], stack: str) -> Iterator[str]:
    yield f"### The loss in the log, TRL {runs['unpatched']['release']}"
    yield curves({name: run["losses"] for name, run in runs.items()})
    steps = len(runs["unpatched"]["losses"])
    fixed = f" *Fixed* is TRL {runs['fixed']['release']}, without the patch." if "fixed" in runs else ""
    yield (
        f"The run of the proof for {steps} steps, with a learning rate of 0.001. It shows what the log would show, and "
        f"not how well a model is trained.{fixed} Stack: `{stack}`."
    )


def curves(runs: Mapping[str, Sequence[float | None]]) -> str:
    """Draw the losses of each run by step. A line has a gap where a loss is no number."""
    kinds = {"fixed": "right", "unpatched": "before", "patched": "after"}
    finite = [loss for losses in runs.values() for loss in losses if loss is not None]
    low, high, last = min(finite), max(finite), max(len(losses) for losses in runs.values()) - 1
    shapes = [f'<text x="40" y="{y}" text-anchor="end">{loss:.4g}</text>' for loss, y in ((high, 30), (low, 174))]
    shapes += [f'<text x="{x}" y="192" text-anchor="middle">{step}</text>' for step, x in ((1, 48), (last + 1, 412))]
    shapes.append('<line x1="46" x2="414" y1="176" y2="176"/><line x1="46" x2="46" y1="24" y2="176"/>')
    # Later lines are drawn on top of earlier ones.
    for column, name in enumerate(name for name in kinds if name in runs):
        kind, x = kinds[name], 48 + 120 * column
        shapes.append(f'<polyline class="{kind}" points="{x},10 {x + 20},10"/><text x="{x + 26}" y="14">{name}</text>')
        points = [
            None if loss is None else f"{48 + 364 * step / last:.1f},{170 - 140 * (loss - low) / (high - low or 1):.1f}"
            for step, loss in enumerate(runs[name])
        ]
        for piece in " ".join("|" if point is None else point for point in points).split("|"):
            if piece.strip():
                shapes.append(f'<polyline class="{kind}" points="{piece.strip()}"/>')
    ends = ", ".join(f"{name} {number(losses[0])} to {number(losses[-1])}" for name, losses in runs.items())
    label = f"loss by step: {ends}"
    return f'<svg class="curves" viewBox="0 0 420 198" role="img" aria-label="{label}">{"".join(shapes)}</svg>'


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def number(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.6g}" if isinstance(value, float) else escape(str(value))


def docstring(patch: Patch) -> str:
    spec = find_spec(modules.module_of(patch.id))
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"{patch.id} has no module {modules.module_of(patch.id)}")
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def from_docstring(text: str) -> Iterator[str]:
    """Yield the blocks of a docstring as Markdown: paragraphs, lists of ``- ``, and formulas, which are indented."""
    for block in text.split("\n\n"):
        lines = block.strip("\n").splitlines()
        if all(line.startswith("    ") for line in lines):
            yield _fenced("text", textwrap.dedent("\n".join(lines)))
        elif lines[0].startswith("- "):
            items = re.split(r"\n(?=- )", "\n".join(lines))
            yield "\n".join(f"- {_quoted(item.removeprefix('- '))}" for item in items)
        else:
            yield _quoted("\n".join(lines))


def _quoted(text: str) -> str:
    """Return text as Markdown in which code stands between double backticks."""
    pieces = re.split(r"``(.+?)``", text, flags=re.DOTALL)
    return "".join(_code(piece) if index % 2 else prose(piece) for index, piece in enumerate(pieces))


def prose(text: str) -> str:
    """Return plain text as Markdown: what looks like code is set as code, papers and threads of TRL are linked."""
    text = re.sub(r"\s+", " ", text)
    pieces, end = [], 0
    for match in MARKED.finditer(text):
        pieces.append(_escaped(text[end : match.start()]))
        pieces.append(_link(match) if match["link"] else _code(match[0]))
        end = match.end()
    return "".join([*pieces, _escaped(text[end:])])


def _link(match: re.Match[str]) -> str:
    if match["paper"]:
        return f"[arXiv:{match['paper']}](https://arxiv.org/abs/{match['paper']})"
    section = "pull" if match["kind"].lower().startswith("pull") else "issues"
    return f"[{match[0]}](https://github.com/huggingface/trl/{section}/{match['number']})"


def _code(text: str) -> str:
    return f"`` {text} ``" if "`" in text else f"`{' '.join(text.split())}`"


def _escaped(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "&#124;")
    return re.sub(r"([\\`*_\[\]])", r"\\\1", text)


def _releases(specifiers: str) -> str:
    """Return the first and the last release of a range, such as ``0.9.6 to 0.11.4``."""
    releases = [release for release in matrix()["releases"] if in_range(release, specifiers)]
    last = "" if len(releases) == 1 else f" to {releases[-1]}"
    return f'<span class="line">{releases[0]}{last}</span>'


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"
