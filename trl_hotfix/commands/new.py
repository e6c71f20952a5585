"""``new``: the three parts of a new patch, red before anything is repaired."""

from __future__ import annotations

import importlib
import json
import os
import textwrap
from datetime import date, timedelta
from importlib.util import cache_from_source
from pathlib import Path
from typing import TypedDict

import click
import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..catalogue import checks, loading
from ..catalogue.data_files import manifest as manifest_path
from ..catalogue.parsing import parse
from ..errors import CatalogueError, plain, suggestion
from ..matching.sources import NotATrlError, Release, installed
from ..model import Severity
from .common import Exit

REVIEW_AFTER = timedelta(days=181)
WIDTH = 140
WRAPPER = "leave_as_it_is"

ENTRY = """
- id: {id}
  revision: 1
  {title}
  severity: {severity}
  trl: "{trl}"
  upstream: {upstream}
{review}  why: >-
    Whom it hits, with which settings; what goes wrong, and by how much; what the user sees, or that nothing is logged.
  how: >-
    What is changed in which call, and what stays as it is for whom the bug does not hit.
  targets:
{targets}
  self_test: bug_is_gone
  hits:
    - trainers: [{trainers}]
      symptom: what the user sees, in half a sentence
"""

MODULE = '''"""{title}.

What goes wrong and why, in TRL's code; what TRL has changed ({upstream}).

What is done here instead; whom it does not hit, and what is not repaired.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..model import Outcome


def {wrapper}(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call TRL as it was called: nothing is repaired yet."""
    return wrapped(*args, **kwargs)


def bug_is_gone(leaf: ModuleType) -> Outcome:
    """What {attribute} of ``leaf`` gives, against the number by the formula."""
    raise NotImplementedError("write the self-test first: measure, and return judge(measured, right=..., wrong=...)")
'''

PROOF = '''"""The proof: one step of the real trainer with a tiny model.

What is right, and where that number comes from, without TRL's code.
"""

from __future__ import annotations

import tiny

OVERLAYS = ()
PARITY = False


def train() -> tiny.Seen:
    """The run that the bug hits: ``tiny.Seen(judge(loss, right=..., wrong=...), loss, gradients)``.

    ``tiny.llama(folder, seed=0)`` is a model, ``tiny.FirstStep(model)`` notes its gradients, and ``tiny.trainer(...)``
    with ``tiny.config(...)`` is the trainer, by the names that each release has.
    """
    raise NotImplementedError("write the proof first: train with the real trainer, and judge its loss")


def unaffected() -> tiny.Seen:
    """A run through the patched method which the bug spares: without the patch and with it the same, to the bit."""
    raise NotImplementedError("write the proof first: a run that the bug does not hit")
'''

NEXT = """
Next, in this order:
  1. Write the self-test in {module}, until
         trl-hotfix verify {id}
     says `unrepaired`: red is `reproduced`, and with the patch it still is. Now it says `error`.
  2. Write the wrapper, until it says `proven`: reproduced, fixed, reproduced.
  3. Write the proof in {proof}, until
         python tests/bench/bench.py run --releases {release} --patches {id} --no-write
     says `proven` for the cell and the proof.
  4. Write title, why, how, severity and upstream in patches.yaml, and the module's docstring; and under hits the
     arguments that the bug needs, so that
         trl-hotfix scan
     of a training script says it for whom it hits, and not for others.
  5. Set trl: there to the releases that have the bug (now "{trl}"), until
         make matrix PATCHES={id}
     has no `uncovered` (too narrow), no `not-reproduced` (too wide), and no proof that fails. It also puts the bodies
     of the method on record: before, the patch is `skipped` (`unknown-body`) for everybody.
  6. Run `make test`.
docs/add-a-patch.md goes through one, step by step.
"""

Targets = tuple[tuple[str, str], ...]
"""Module and attribute of each."""


class Answer(TypedDict):
    """What was written, from the top of the checkout: the entry went to the end of the manifest."""

    id: str
    trl: str
    manifest: str
    module: str
    proof: str


@click.command("new")
@click.argument("patch_id", metavar="ID")
@click.option("--pull", type=click.IntRange(1), metavar="N", help="TRL's pull request that fixes it.")
@click.option(
    "--target", "named", multiple=True, required=True, metavar="MODULE:ATTRIBUTE", help="trl.trainer.x:Class.method"
)
@click.option(
    "--trl", "specifiers", metavar="RANGE", help="The releases that have the bug; default: the one looked at."
)
@click.option("--severity", type=click.Choice([each.value for each in Severity]), default=Severity.WRONG_LOSS.value)
@click.option("--title", help="What goes wrong, in one sentence.")
@click.option(
    "--wheel", type=click.Path(path_type=Path), help="A TRL wheel or a folder with one, to look for the target."
)
@click.option("--json", "as_data", is_flag=True, help="What was written as JSON.")
def command(
    patch_id: str,
    pull: int | None,
    named: tuple[str, ...],
    specifiers: str | None,
    severity: str,
    title: str | None,
    wheel: Path | None,
    as_data: bool,
) -> int:
    """Begin a new patch, in a checkout of trl_hotfix: its entry in patches.yaml, its module and its proof.

    It repairs nothing yet, and its self-test and its proof fail until they are written. Prints what to do next.
    """
    checkout = _checkout()
    _check_id(patch_id)
    release = _release(wheel)
    targets = tuple(_target(each, release) for each in dict.fromkeys(named))
    wanted = _range(specifiers, release)
    title = " ".join((title or "").split()) or f"What goes wrong with {targets[0][1]}, in one sentence"
    if not title.isprintable():
        raise click.UsageError(f"--title {plain(title)} is not plain text")
    name = patch_id.replace("-", "_")
    module, proof = Path("trl_hotfix", "patches", f"{name}.py"), Path("tests", "proofs", f"{name}.py")
    words = {"id": patch_id, "title": title, "severity": severity, "trl": wanted}
    link = f"pull request {pull}" if pull else "no pull request yet"
    code = MODULE.format(title=_docstring(title), upstream=link, wrapper=WRAPPER, attribute=targets[0][1])
    _write(checkout, {module: code, proof: PROOF}, _entry(words, pull, targets))
    if as_data:
        answer = Answer(id=patch_id, trl=wanted, manifest="patches.yaml", module=str(module), proof=str(proof))
        click.echo(json.dumps(answer, indent=2))
        return Exit.FINE
    for path in (Path("patches.yaml"), module, proof):
        click.echo(f"{'appended to' if path.suffix == '.yaml' else 'wrote'} {path}")
    click.echo(NEXT.format(**words, module=module, proof=proof, release=release.version), nl=False)
    return Exit.FINE


def _checkout() -> Path:
    """The checkout that this package is run from."""
    folder = manifest_path().parent
    lacking = [
        name for name in ("pyproject.toml", "patches.yaml", "tests/tiny/__init__.py") if not (folder / name).is_file()
    ]
    if lacking:
        raise click.ClickException(
            f"{folder} is no checkout of trl_hotfix (it has no {', '.join(lacking)}): clone the repository, and run "
            "`pip install -e .` in it. For patches of your own, docs/packs.md"
        )
    return folder


def _check_id(patch_id: str) -> None:
    if not checks.ID.match(patch_id):
        raise click.UsageError(f"id {patch_id!r} is not lower-case words joined by '-'")
    if patch_id in {patch.id for patch in loading.load()}:
        raise click.UsageError(f"there is a patch {patch_id!r} already")


def _release(wheel: Path | None) -> Release:
    """Where to look for the target: in the wheel, or else in the TRL that is installed."""
    try:
        release = installed() if wheel is None else Release(wheel)
    except NotATrlError as error:
        raise click.ClickException(str(error)) from None
    if release is None:
        raise click.ClickException(
            "TRL is not installed here, or as an editable checkout: name a release that has the bug, --wheel FILE"
        )
    return release


def _target(text: str, release: Release) -> tuple[str, str]:
    module, colon, attribute = text.partition(":")
    if not (colon and checks.MODULE.match(module) and checks.ATTRIBUTE.match(attribute)):
        raise click.UsageError(
            f"--target {text!r} is not MODULE:FUNCTION or MODULE:CLASS.METHOD of TRL, such as "
            "trl.trainer.dpo_trainer:DPOTrainer.compute_loss"
        )
    modules = release.modules()
    if module not in modules:
        raise click.UsageError(f"TRL {release.version} has no module {module!r}{suggestion(module, modules)}")
    if release.body(module, attribute) is None:
        said = suggestion(attribute, release.attributes(module))
        raise click.UsageError(
            f"TRL {release.version} has no {attribute!r} of its own in {module}{said or ', nor one that is like it'}"
        )
    return module, attribute


def _range(specifiers: str | None, release: Release) -> str:
    """The narrowest claim is the one release that was looked at: the bench says on which others the bug is too."""
    if specifiers is None:
        return f"=={release.version}"
    try:
        inside = SpecifierSet(specifiers).contains(release.version, prereleases=True)
    except InvalidSpecifier:
        raise click.UsageError(f"--trl {specifiers!r} is not a range such as '>=0.11.0,<0.12.0'") from None
    if not inside:
        raise click.UsageError(
            f"--trl {specifiers!r} does not have TRL {release.version}, where the target was looked for: "
            "name a release that has the bug, --wheel FILE"
        )
    return str(specifiers)


def _entry(words: dict[str, str], pull: int | None, targets: Targets) -> str:
    lines = []
    for module, attribute in targets:
        line = f"    - {{module: {module}, attribute: {attribute}, wrapper: {WRAPPER}}}"
        if len(line) > WIDTH:
            line = f"    - module: {module}\n      attribute: {attribute}\n      wrapper: {WRAPPER}"
        lines.append(line)
    # As YAML writes it: a title may have a colon or begin with a quote.
    title = yaml.safe_dump({"title": words["title"]}, width=10**6, allow_unicode=True).strip()
    # As the catalogue asks: a range without an end claims releases that nobody has seen.
    endless = SpecifierSet(words["trl"]).contains("999999")
    review = f'  review_by: "{date.today() + REVIEW_AFTER}"\n' if endless else ""
    upstream = f"{{fix: {pull}}}" if pull else "{}"
    owners = dict.fromkeys(attribute.partition(".")[0] for _, attribute in targets)
    named = [owner.removesuffix("Trainer") for owner in owners if owner.endswith("Trainer") and owner != "Trainer"]
    parts = {"upstream": upstream, "review": review, "targets": "\n".join(lines)}
    # Of what is no method of a trainer, any trainer may be the user.
    return ENTRY.format(**{**words, "title": title}, **parts, trainers=", ".join(named) or '"*"')


def _docstring(title: str) -> str:
    escaped = title.rstrip(".").replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(textwrap.wrap(escaped, 110))


def _write(checkout: Path, texts: dict[Path, str], entry: str) -> None:
    """The new files and the longer ``patches.yaml``, or nothing of them."""
    manifest = checkout / "patches.yaml"
    longer = manifest.read_text(encoding="utf-8").rstrip("\n") + "\n" + entry
    partial = manifest.with_name(f".patches.yaml.{os.getpid()}.partial")
    written = [partial]
    try:
        for path, text in texts.items():
            with (checkout / path).open("x", encoding="utf-8") as file:
                written.append(checkout / path)
                file.write(text)
        importlib.invalidate_caches()
        # Reads the new module too: the command line must work afterwards.
        parse(longer, str(manifest))
        partial.write_text(longer, encoding="utf-8")
        partial.replace(manifest)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
            Path(cache_from_source(str(path))).unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise click.ClickException(f"{error.filename} is there already; nothing was written") from None
        if isinstance(error, OSError):
            raise click.ClickException(f"{error.filename}: {error.strerror}; nothing was written") from None
        if isinstance(error, CatalogueError):
            raise click.ClickException(f"the new entry is none; nothing was written. {error}") from None
        raise
