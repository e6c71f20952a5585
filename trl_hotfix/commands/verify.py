"""``verify`` runs the self-tests in a fresh process: red, green, red. With ``--full`` it also runs the proofs."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict

import click

from .. import __version__
from ..catalogue import loading
from ..catalogue.data_files import PACKAGE as FOLDER
from ..catalogue.data_files import checkout, data_file
from ..catalogue.modules import family_of
from ..catalogue.names import by_name, id_of
from ..catalogue.packs import VARIABLE, named, pack_of
from ..errors import DamagedError, UnknownPatchError
from ..matching import gates, versions
from ..model import Patch, State
from ..reporting.sentences import because
from ..reporting.table import show
from ..settings import without_our_variables
from .common import Exit, search_path, unsupported, with_packs
from .progress import progress
from .verify_screen import GOOD, CellAnswer, ProofAnswer, losses, verdicts

PACKAGE = __package__.partition(".")[0]


class Answer(TypedDict):
    trl_hotfix: str
    trl: str
    cells: list[CellAnswer]
    proofs: list[ProofAnswer]


@click.command("verify")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--full", is_flag=True, help="Also train tiny models with the real trainers; some seconds a patch.")
@click.option("--json", "as_data", is_flag=True, help="The verdicts and the numbers as JSON.")
@with_packs
def command(ids: tuple[str, ...], full: bool, as_data: bool, packs: str | None) -> int:
    """Run the self-tests on the TRL installed here, in a fresh process: red, patched green, reverted red.

    Without IDs: those of every patch that applies here.
    """
    names = named(packs, os.environ)
    patches = loading.known(names)
    known = by_name(patches)
    unknown = [patch_id for patch_id in ids if patch_id not in known]
    if unknown:
        raise UnknownPatchError(unknown, known, "verify")
    trl = versions.installed("trl")
    if unsupported(trl) or trl is None:
        click.echo(f"TRL is {trl or 'not installed'}; {versions.SUPPORTED} is needed", err=True)
        return Exit.NO_TRL
    applicable = (patch.id for patch in patches if gates.applicability(patch).state is State.PENDING)
    chosen = tuple(id_of(name, known) for name in ids) or tuple(applicable)
    with tempfile.TemporaryDirectory() as folder:
        scripts = _proofs(Path(folder, "proofs")) if full else None
        cells = verified(chosen, names, Path(folder)) if chosen else []
        proofs = _trained(chosen, scripts, Path(folder)) if scripts is not None else []
    answer: Answer = {"trl_hotfix": __version__, "trl": trl, "cells": cells, "proofs": proofs}
    if as_data:
        click.echo(json.dumps(answer, indent=2))
    elif not cells:
        click.echo(f"no patch applies to TRL {trl}")
    else:
        show(verdicts(cells, {patch.id: _gates_say(patch) for patch in patches}))
        if proofs:
            show(losses(proofs))
    return Exit.FINE if all(result["verdict"] in GOOD for result in (*cells, *proofs)) else Exit.DEGRADED


def _gates_say(patch: Patch) -> str:
    decision = gates.applicability(patch)
    return because(decision.reason, decision.evidence)


def verified(ids: Sequence[str], packs: Sequence[str], folder: Path) -> list[CellAnswer]:
    out = folder / "verdicts"
    command = [sys.executable, "-m", f"{PACKAGE}.verification", str(out), *ids]
    # `python -m` puts the working folder first on the path: that of a pack's project would hide the installed pack.
    environment = {**without_our_variables(), VARIABLE: ",".join(packs), "PYTHONPATH": search_path(sys.path)}
    # TRL's output during its import goes to standard error, since standard output is for the answer and may be JSON.
    with (
        progress("self-tests", len(ids)) as advance,
        subprocess.Popen(command, env=environment, cwd=folder, stdout=sys.stderr) as process,
    ):
        while process.poll() is None:
            advance(len(_lines(out)), "")
            time.sleep(0.1)
    cells: list[CellAnswer] = [json.loads(line) for line in _lines(out)]
    if process.returncode or len(cells) < len(set(ids)):
        verified = {cell["patch"] for cell in cells}
        next_id = next((patch_id for patch_id in ids if patch_id not in verified), "")
        raise click.ClickException(
            f"the process that runs the self-tests ended with exit code {process.returncode}"
            + (f"; {next_id} was next" if next_id else "")
        )
    return cells


def _lines(file: Path) -> list[str]:
    """Return the complete lines of a file that is being written."""
    return file.read_text(encoding="utf-8").split("\n")[:-1] if file.is_file() else []


def _trained(ids: Sequence[str], proofs: Path, folder: Path) -> list[ProofAnswer]:
    answers: list[ProofAnswer] = []
    with progress("trainings", len(ids)) as advance:
        for number, patch_id in enumerate(ids):
            advance(number, patch_id)
            answers.append({"patch": patch_id, **_proof(patch_id, proofs, folder)})  # type: ignore[typeddict-item]
    return answers


def _proof(patch_id: str, proofs: Path, folder: Path) -> dict[str, Any]:
    """Run the proof of one patch in a fresh process. Its tiny models are made from configs, without the hub."""
    file = proofs / "proofs" / family_of(patch_id) / f"{patch_id.replace('-', '_')}.py"
    if pack_of(patch_id) or not file.is_file():
        return {"verdict": "not-run", "why": "no proof comes with it", "runs": {}}
    missing = [distribution for distribution in _needs(file) if versions.installed(distribution) is None]
    if missing:
        return {"verdict": "not-run", "why": f"it needs {', '.join(missing)}", "runs": {}}
    out, scratch = folder / "proof.json", folder / patch_id
    out.unlink(missing_ok=True)
    scratch.mkdir()
    command = [sys.executable, "-m", "bench.proving.prove", str(out), str(folder / "gradients"), patch_id]
    # `bench` is beside the unpacked proofs of a wheel, and in a checkout beside this package.
    path = os.pathsep.join(filter(None, [str(proofs), str(FOLDER.parent), os.environ.get("PYTHONPATH")]))
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TMPDIR": str(scratch), "PYTHONPATH": path}
    environment = {**without_our_variables(), **variables}
    process = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, check=False)
    if not out.is_file():
        last = (process.stderr.strip().splitlines() or [""])[-1]
        problem = f"the process ended with exit code {process.returncode}: {last}"
        return {"verdict": "error", "why": problem, "runs": {}}
    answer: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return answer


def _proofs(folder: Path) -> Path:
    """Return the folder of the proofs: that of a checkout, or ``folder``, to which those of a wheel are unpacked."""
    if (source := checkout()) is not None:
        return source / "tests"
    archive = data_file("proofs.tar.bz2")
    try:
        with tarfile.open(archive, "r:bz2") as packed:
            for member in packed:
                content = packed.extractfile(member)
                assert content is not None
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DamagedError(archive, error) from error
    return folder


def _needs(proof: Path) -> Sequence[str]:
    """Return the distributions that a proof needs besides TRL's dependencies. It only reads the proof."""
    for statement in ast.parse(proof.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and [ast.unparse(name) for name in statement.targets] == ["OVERLAYS"]:
            distributions: Sequence[str] = ast.literal_eval(statement.value)
            return distributions
    return ()
