"""``explain``: one bug: what you see, why, what the patch does, and why it goes on here or does not."""

from __future__ import annotations

import ast
import difflib
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypedDict

import click
from rich import box
from rich.console import Group
from rich.padding import Padding
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from .. import __version__
from ..catalogue import evidence, loading
from ..catalogue.modules import module_of
from ..catalogue.packs import named
from ..errors import UnknownPatchError
from ..matching import sources, versions
from ..matching.fingerprints import bodies_for
from ..model import Patch, Target
from ..patching.previews import preview
from ..reporting.report import PatchStatus
from ..reporting.sentences import because, links, turn_off
from ..reporting.table import show
from ..reporting.trail import Step, trail
from ..selection.selection import Selection
from .common import Exit, unsupported, with_packs


class TargetAnswer(TypedDict):
    module: str
    attribute: str
    trl: str


class OptionAnswer(TypedDict):
    choices: dict[str, str]
    default: str


class StepAnswer(TypedDict):
    gate: str
    found: str
    passed: bool | None


class ProofAnswer(TypedDict):
    release: str
    stack: str
    verdict: str
    runs: dict[str, dict[str, Any]]


class ParityAnswer(TypedDict):
    release: str
    fixed_release: str
    loss_difference: float
    gradient_difference: float


class Answer(TypedDict):
    trl_hotfix: str
    id: str
    revision: int
    title: str
    severity: str
    trl: str
    requires: dict[str, str]
    review_by: str | None
    fixed_in: str | None
    links: list[str]
    why: str
    how: str
    notes: str
    options: dict[str, OptionAnswer]
    targets: list[TargetAnswer]
    proven_on: list[str]
    proofs: list[ProofAnswer]
    parity: list[ParityAnswer]
    turn_off: list[str]
    installed: str | None
    state: str
    reason: str
    because: str
    trail: list[StepAnswer]
    differences: dict[str, str]


@click.command("explain")
@click.argument("patch_id", metavar="ID")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="A TRL wheel, or a folder with one: what the installed TRL has changed in the patched methods since.",
)
@click.option("--json", "as_data", is_flag=True, help="All of it as JSON.")
@with_packs
def command(patch_id: str, against: Path | None, as_data: bool, packs: str | None) -> int:
    """One bug: what you see when it hits you, why, what the patch does, and whether it goes on here."""
    names = named(packs, os.environ)
    patches = loading.known(names)
    patch = next((each for each in patches if each.id == patch_id), None)
    if patch is None:
        raise UnknownPatchError([patch_id], [each.id for each in patches], "explain")
    selection = Selection.of(None, None, os.environ, patches, None, names)
    found = preview(patches, selection)[patch_id]
    installed = sources.installed()
    steps = trail(patch, selection, installed)
    differences = _differences(patch, installed, _release(against)) if against is not None else {}
    answer = _answer(patch, found, steps, differences)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(_screen(answer, patch, found))
    return Exit.NO_TRL if unsupported(versions.installed("trl")) else Exit.FINE


def _release(path: Path) -> sources.Release:
    try:
        return sources.Release(path)
    except sources.NotATrlError as error:
        raise click.ClickException(str(error)) from None


def _differences(patch: Patch, installed: sources.Release | None, other: sources.Release) -> dict[str, str]:
    """For each target that differs: what the installed TRL has changed since ``other``, as a unified diff."""
    if installed is None:
        raise click.ClickException("--against: the files of a TRL that is installed here cannot be read")
    found = {}
    for target in patch.targets:
        texts = [each.text(target.module, target.attribute) for each in (other, installed)]
        if texts[0] != texts[1]:
            before, after = ((text or "").splitlines() for text in texts)
            names = (f"TRL {other.version}", f"TRL {installed.version}")
            found[target.name] = "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))
    return found


def _notes(patch: Patch) -> str:
    """What the author says of the bug and the repair, with formulas and sources: the text at the top of the module."""
    spec = find_spec(module_of(patch.id))
    assert spec is not None
    assert spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _answer(patch: Patch, found: PatchStatus, steps: list[Step], differences: dict[str, str]) -> Answer:
    return {
        "trl_hotfix": __version__,
        "id": patch.id,
        "revision": patch.revision,
        "title": patch.title,
        "severity": patch.severity.value,
        "trl": patch.trl,
        "requires": dict(patch.requires),
        "review_by": patch.review_by.isoformat() if patch.review_by is not None else None,
        "fixed_in": patch.upstream.fixed_in,
        "links": links(patch.upstream),
        "why": patch.why,
        "how": patch.how,
        "notes": _notes(patch),
        "options": {
            name: {"choices": dict(each.choices), "default": each.default} for name, each in patch.options.items()
        },
        "targets": [
            {"module": each.module, "attribute": each.attribute, "trl": patch.range_of(each)} for each in patch.targets
        ],
        "proven_on": list(evidence.proven_on(patch)),
        "proofs": [
            {"release": each["release"], "stack": each["stack"], "verdict": each["verdict"], "runs": each["runs"]}
            for each in evidence.proofs_of(patch)
        ],
        "parity": [
            {
                "release": each["release"],
                "fixed_release": each["fixed_release"],
                "loss_difference": each["loss_difference"],
                "gradient_difference": each["gradient_difference"],
            }
            for each in evidence.parity_of(patch)
        ],
        "turn_off": turn_off(patch),
        "installed": versions.installed("trl"),
        "state": found.state.value,
        "reason": found.reason.value,
        "because": because(found.reason, found.evidence),
        "trail": [{"gate": step.gate, "found": step.observation, "passed": step.passed} for step in steps],
        "differences": differences,
    }


def _screen(answer: Answer, patch: Patch, found: PatchStatus) -> Group:
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    open_end = f"still in the newest release looked at; to be reviewed by {answer['review_by']}"
    rows = [
        ("severity", answer["severity"]),
        ("TRL", f"{answer['trl']}; {'fixed in ' + answer['fixed_in'] if answer['fixed_in'] else open_end}"),
        *(("requires", f"{name} {wanted}") for name, wanted in answer["requires"].items()),
        *(("upstream", link) for link in answer["links"]),
        *(("target", f"{each['module']}: {each['attribute']} ({each['trl']})") for each in answer["targets"]),
        ("evidence", evidence.in_words(patch)),
        *(("proof", line) for line in _proofs(answer)),
    ]
    for name, option in answer["options"].items():
        for choice, meaning in option["choices"].items():
            default = " (default)" if choice == option["default"] else ""
            rows.append(("option", f"{name}={choice}{default}: {meaning}"))
    rows += [("turn off", each) for each in answer["turn_off"]]
    for name, value in rows:
        facts.add_row(Text(name), Text(value))
    marks = {True: ("yes", "green"), False: ("no", "bold red"), None: ("?", "yellow")}
    gate_by_gate = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("gate", "found", "passed"):
        gate_by_gate.add_column(column, overflow="fold")
    for step in answer["trail"]:
        word, colour = marks[step["passed"]]
        gate_by_gate.add_row(Text(step["gate"]), Text(step["found"]), Text(word, style=colour))
    parts: list[Any] = [
        Text(f"{answer['id']} (revision {answer['revision']})", style="bold"),
        Text(answer["title"]),
        *_section("What you see, and why", answer["why"]),
        *_section("What the patch does", answer["how"]),
        *_section("More", answer["notes"]),
        Text(""),
        facts,
        *_section(f"Here: {answer['state']} ({answer['reason']})", answer["because"]),
        gate_by_gate,
    ]
    for target, difference in answer["differences"].items():
        parts += [Text(f"what has changed in {target}", style="bold"), Syntax(difference, "diff", word_wrap=True)]
    if any(step["passed"] is False and "on record for no release" in step["found"] for step in answer["trail"]):
        parts.append(Text(_hint(patch)))
    return Group(*parts)


def _section(head: str, text: str) -> list[Any]:
    paragraphs = "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))
    return [Text(""), Text(head, style="bold"), Padding(Text(paragraphs), (0, 0, 0, 2), expand=False)]


def _proofs(answer: Answer) -> list[str]:
    """The numbers of the first release that was trained, and the comparison with the fixed one."""
    said = []
    proven = [each for each in answer["proofs"] if each["verdict"] == "proven"]
    for proof in proven[:1]:
        red, green = (proof["runs"][name].get("measured") for name in ("red", "green"))
        right = proof["runs"]["red"].get("right")
        if _is(red) and _is(green):
            known = f", {right:.7g} is right" if _is(right) else ""
            said.append(f"trained with TRL {proof['release']}: {red:.7g} before, {green:.7g} patched{known}")
    for each in answer["parity"][:1]:
        most = max(each["loss_difference"], each["gradient_difference"])
        said.append(
            f"patched TRL {each['release']} is TRL {each['fixed_release']}, losses and gradients, to {most:.1g}"
        )
    return said


def _is(value: Any) -> bool:
    return isinstance(value, (int, float))


def _hint(patch: Patch) -> str:
    """How to see what has changed: the sources of other releases are not part of this package."""
    known = bodies_for(patch.id)
    releases = [
        each for target in patch.targets for each in known.releases_with(target.name, _last_buggy(patch, target))
    ]
    if not releases:
        return ""
    last = releases[-1]
    return (
        f"To see what has changed since TRL {last}: pip download --no-deps trl=={last}; "
        f"trl-hotfix explain {patch.id} --against trl-{last}-py3-none-any.whl"
    )


def _last_buggy(patch: Patch, target: Target) -> str | None:
    known = bodies_for(patch.id)
    buggy = [body for body, its in known.targets.get(target.name, {}).items() if its["is"].get(patch.id) == "buggy"]
    return max(buggy, key=lambda body: known.releases.index(known.releases_with(target.name, body)[-1]), default=None)
