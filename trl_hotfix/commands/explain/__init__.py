"""``explain`` describes one bug: its symptom and cause, its repair, and why the patch goes on here or does not.

``answer`` is the shape of what it says, ``screen`` shows it, and ``known`` is for bugs without a repair.
"""

from __future__ import annotations

import ast
import difflib
import json
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import click

from ... import __version__
from ...catalogue import loading, on_record
from ...catalogue.modules import module_of
from ...catalogue.names import by_name, id_of
from ...catalogue.packs import named
from ...errors import NotATrlError, UnknownPatchError, quoted
from ...matching import sources, versions
from ...model import KnownBug, Patch
from ...patching.previews import preview
from ...reporting.report import PatchStatus
from ...reporting.sentences import because, fixed_in_layers, links, turn_off
from ...reporting.table import show
from ...reporting.trail import Step, trail
from ...selection.selection import Selection
from ...settings import tries_unknown_body
from ..common import Exit, unsupported, with_packs
from .answer import Answer
from .known import known_answer, known_view, ways_into
from .screen import answer_view


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
    """One bug: what you see when it hits you, why, what the patch does, and whether it goes on here.

    A part of an ID is enough if one bug alone has it. If several have it, it lists them, and the exit code is 2.
    """
    names = named(packs, os.environ)
    patches = loading.known(names)
    known = by_name(patches)
    without_repair = {bug.id: bug for bug in loading.without_repair()}
    if patch_id not in known and patch_id not in without_repair:
        patch_id = _only_match(patch_id, [*(patch.id for patch in patches), *without_repair])
    if patch_id in without_repair:
        if against is not None:
            raise click.UsageError(f"--against: {patch_id} is a known bug without a repair, and wraps no method")
        return _explain_known(without_repair[patch_id], as_data)
    patch = known[id_of(patch_id, known)]
    selection = Selection.of(None, None, os.environ, patches, None, names)
    installed = sources.installed()
    tried = tries_unknown_body(os.environ.get("TRL_HOTFIX_UNKNOWN_BODY", ""))
    status = preview([patch], selection, files=installed, try_unknown_body=tried)[patch.id]
    steps = trail(patch, selection, installed)
    differences = _differences(patch, installed, _release(against)) if against is not None else {}
    answer = _answer(patch, status, steps, differences)
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(answer_view(answer, patch))
    return Exit.NO_TRL if unsupported(versions.installed("trl")) else Exit.FINE


def _only_match(part: str, ids: Sequence[str]) -> str:
    """Return the one id with this part. Raises ``UnknownPatchError`` if none has it."""
    matches = [patch_id for patch_id in ids if part and part.lower() in patch_id]
    if not matches:
        raise UnknownPatchError([part], ids, "explain")
    if len(matches) > 1:
        lines = "".join(f"\n  {patch_id}" for patch_id in sorted(matches))
        raise click.ClickException(f"{quoted(part)} is a part of {len(matches)} ids; give one of them:{lines}")
    return matches[0]


def _explain_known(bug: KnownBug, as_data: bool) -> int:
    answer = known_answer(bug, versions.installed("trl"))
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    else:
        show(known_view(answer))
    return Exit.NO_TRL if unsupported(answer["installed"]) else Exit.FINE


def _release(path: Path) -> sources.Release:
    try:
        return sources.Release(path)
    except NotATrlError as error:
        raise click.ClickException(str(error)) from None


def _differences(patch: Patch, installed: sources.Release | None, reference: sources.Release) -> dict[str, str]:
    """Return a unified diff from ``reference`` to the installed TRL for each target that differs."""
    if installed is None:
        raise click.ClickException("--against: the files of a TRL that is installed here cannot be read")
    differences = {}
    for target in patch.targets:
        texts = [release.text(target.module, target.attribute) for release in (reference, installed)]
        if texts[0] != texts[1]:
            before, after = ((text or "").splitlines() for text in texts)
            names = (f"TRL {reference.version}", f"TRL {installed.version}")
            differences[target.name] = "\n".join(difflib.unified_diff(before, after, *names, lineterm=""))
    return differences


def _notes(patch: Patch) -> str:
    """Return the docstring of the patch's module, with the author's formulas and sources."""
    spec = find_spec(module_of(patch.id))
    assert spec is not None
    assert spec.origin is not None
    return ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""


def _answer(patch: Patch, status: PatchStatus, steps: list[Step], differences: dict[str, str]) -> Answer:
    return {
        "trl_hotfix": __version__,
        "id": patch.id,
        "revision": patch.revision,
        "title": patch.title,
        "severity": patch.severity.value,
        "harm": patch.harm.value if patch.harm is not None else None,
        "trl": patch.trl,
        "requires": dict(patch.requires),
        "review_by": patch.review_by.isoformat() if patch.review_by is not None else None,
        "layer": patch.layer,
        "fixed_in": patch.upstream.fixed_in,
        "fixed_in_layers": fixed_in_layers(patch),
        "links": links(patch.upstream),
        "why": patch.why,
        "when": ways_into(patch),
        "how": patch.how,
        "not_repaired": patch.not_repaired,
        "retrain": patch.retrain,
        "notes": _notes(patch),
        "options": {
            name: {"choices": dict(option.choices), "default": option.default} for name, option in patch.options.items()
        },
        "targets": [
            {
                "module": target.module,
                "attribute": target.attribute,
                "trl": patch.range_of(target),
                "called": target.called.value if target.called is not None else None,
            }
            for target in patch.targets
        ],
        "proven_on": list(on_record.proven_on(patch)),
        "proofs": [
            {"release": proof["release"], "stack": proof["stack"], "verdict": proof["verdict"], "runs": proof["runs"]}
            for proof in on_record.proofs_of(patch)
        ],
        "parity": [
            {
                "release": parity["release"],
                "fixed_release": parity["fixed_release"],
                "loss_difference": parity["loss_difference"],
                "gradient_difference": parity["gradient_difference"],
            }
            for parity in on_record.parity_of(patch)
        ],
        "turn_off": turn_off(patch),
        "installed": versions.installed("trl"),
        "state": status.state.value,
        "reason": status.reason.value,
        "because": because(status.reason, status.evidence),
        "trail": [{"gate": step.gate, "found": step.observation, "passed": step.passed} for step in steps],
        "differences": differences,
    }
