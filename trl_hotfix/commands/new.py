"""``new`` begins a patch: its entry, its module, its tests and its proof, which fail until they are written."""

from __future__ import annotations

import importlib
import json
import os
import re
import textwrap
from collections import Counter
from datetime import date, timedelta
from importlib.util import cache_from_source
from pathlib import Path
from typing import TypedDict

import click
import yaml
from packaging.specifiers import InvalidSpecifier, SpecifierSet

from ..catalogue import checks, loading, modules
from ..catalogue.data_files import manifest as manifest_path
from ..catalogue.parsing import parse
from ..errors import CatalogueError, NotATrlError, plain, suggestion
from ..matching.inherited import is_inherited
from ..matching.sources import Release, installed
from ..model import Called, Severity
from .common import Exit
from .new_templates import ENTRY, MODULE, NEXT, PROOF, TESTS

REVIEW_AFTER = timedelta(days=181)
WIDTH = 140
LONGEST_TITLE = 70
"""A longer one does not fit after ``bug:`` in a line of the log. A pack may have it: that stops nobody."""

WRAPPER = "leave_as_it_is"

Targets = tuple[tuple[str, str], ...]
"""The module and the attribute of each target."""


class Answer(TypedDict):
    """The paths of the written files from the top of the checkout."""

    id: str
    family: str
    trl: str
    manifest: str
    module: str
    tests: str
    proof: str


@click.command("new")
@click.argument("patch_id", metavar="ID")
@click.option("--pull", type=click.IntRange(1), metavar="N", help="TRL's pull request that fixes it.")
@click.option(
    "--target", "named", multiple=True, required=True, metavar="MODULE:ATTRIBUTE", help="trl.trainer.x:Class.method"
)
@click.option(
    "--family",
    type=click.Choice(modules.families()),
    metavar="NAME",
    help=f"Its folder, by default that of most patches of its target: {', '.join(modules.families())}.",
)
@click.option(
    "--trl",
    "specifiers",
    metavar="RANGE",
    help="The releases that have the bug; default: that of --wheel, or the installed one.",
)
@click.option(
    "--severity",
    type=click.Choice([level.value for level in Severity]),
    metavar="LEVEL",
    default=Severity.WRONG_LOSS.value,
    help=f"How bad it is: {', '.join(level.value for level in Severity)}.",
)
@click.option("--title", help="What a victim of the bug would type into a search box, in 70 characters.")
@click.option(
    "--wheel", type=click.Path(path_type=Path), help="A TRL wheel or a folder with one, to look for the target."
)
@click.option("--json", "as_data", is_flag=True, help="What was written as JSON.")
def command(
    patch_id: str,
    pull: int | None,
    named: tuple[str, ...],
    family: str | None,
    specifiers: str | None,
    severity: str,
    title: str | None,
    wheel: Path | None,
    as_data: bool,
) -> int:
    """Begin a new patch, in a checkout of trl_hotfix: its entry in patches.yaml, its module, tests and proof.

    It repairs nothing yet, and self-test, tests and proof fail until they are written. Prints what to do next.
    """
    checkout = _checkout()
    _check_id(patch_id)
    release = _release(wheel)
    targets = tuple(_target(text, release) for text in dict.fromkeys(named))
    trl = _range(specifiers, release)
    title = " ".join((title or "").split()) or f"What goes wrong in {targets[0][1]}"[:LONGEST_TITLE]
    if not title.isprintable():
        raise click.UsageError(f"--title {plain(title)} is not plain text")
    if len(title) > LONGEST_TITLE:
        raise click.UsageError(f"--title has {len(title)} characters, and {LONGEST_TITLE} fit after `bug:` in the log")
    name = patch_id.replace("-", "_")
    family = family or _family(targets)
    module, proof = Path("trl_hotfix", "patches", family, f"{name}.py"), Path("tests", "proofs", family, f"{name}.py")
    tests = Path("tests", "patches", family, f"test_{name}.py")
    words = {"id": patch_id, "title": title, "severity": severity, "trl": trl}
    link = f"pull request {pull}" if pull else "no pull request yet"
    code = MODULE.format(title=_docstring(title), upstream=link, wrapper=WRAPPER, attribute=targets[0][1])
    manifest, entry = (checkout / "patches.yaml").read_text(encoding="utf-8"), _entry(words, pull, targets)
    _write(checkout, {module: code, tests: TESTS, proof: PROOF}, with_entry(manifest, entry, patch_id, family))
    if as_data:
        parts = {"manifest": "patches.yaml", "module": str(module), "tests": str(tests), "proof": str(proof)}
        answer = Answer(id=patch_id, family=family, trl=trl, **parts)  # type: ignore[typeddict-item]
        click.echo(json.dumps(answer, indent=2))
        return Exit.FINE
    for path in (Path("patches.yaml"), module, tests, proof):
        click.echo(f"{'added to' if path.suffix == '.yaml' else 'wrote'} {path}")
    click.echo(NEXT.format(**words, module=module, tests=tests, proof=proof, release=release.version), nl=False)
    return Exit.FINE


def _checkout() -> Path:
    """Return the checkout that this package is run from."""
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
    """Return the release in which to look for the target: the wheel, or else the installed TRL."""
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
    if release.body(module, attribute) is None and not is_inherited(release, module, attribute):
        hint = suggestion(attribute, release.attributes(module))
        raise click.UsageError(
            f"TRL {release.version} has no {attribute!r} of its own in {module}, nor inherits it from transformers"
            f"{hint or ', nor has one that is like it'}"
        )
    return module, attribute


def _family(targets: Targets) -> str:
    """Return the family that has the most patches of the first target's module."""
    (module, _), *_ = targets
    of_module = [patch.id for patch in loading.load() if module in {target.module for target in patch.targets}]
    counts = Counter(map(modules.family_of, of_module))
    if not counts:
        raise click.UsageError(f"no patch has a target in {module}: name the --family, {', '.join(modules.families())}")
    return counts.most_common(1)[0][0]


def with_entry(manifest: str, entry: str, patch_id: str, family: str) -> str:
    """Return the text of ``patches.yaml`` with this entry in the section of its family, by its id."""
    texts = re.split(r"(?m)^(?=- id: |# \w+: )", manifest)
    ids = [match[1] if (match := re.match(r"- id: (\S+)", text)) else "" for text in texts]
    before = [index for index, each in enumerate(ids) if modules.family_of(each) == family and each < patch_id]
    first = next(index for index, text in enumerate(texts) if text.startswith(f"# {family}: "))
    at = before[-1] if before else first
    ends = [text.rstrip("\n") for text in (*texts[: at + 1], entry, *texts[at + 1 :])]
    return "\n\n".join(ends) + "\n"


def _range(specifiers: str | None, release: Release) -> str:
    """Return the range of the new patch: by default the one release with its target. The bench finds the others."""
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
        # Anything but a constructor gets the word that promises least of a call in a step; NEXT says to look.
        called = (Called.CONSTRUCTION if attribute.endswith(".__init__") else Called.SOME_STEPS).value
        line = f"    - {{module: {module}, attribute: {attribute}, wrapper: {WRAPPER}, called: {called}}}"
        if len(line) > WIDTH:
            pairs = {"module": module, "attribute": attribute, "wrapper": WRAPPER, "called": called}
            line = "    - " + "\n      ".join(f"{key}: {value}" for key, value in pairs.items())
        lines.append(line)
    # YAML quotes the title if it must: it may have a colon or begin with a quote.
    title = yaml.safe_dump({"title": words["title"]}, width=10**6, allow_unicode=True).strip()
    # The catalogue requires a review date for a range without an end, which claims releases that nobody has tested.
    endless = SpecifierSet(words["trl"]).contains("999999")
    review = f'  review_by: "{date.today() + REVIEW_AFTER}"\n' if endless else ""
    upstream = f"{{fix: {pull}}}" if pull else "{}"
    owners = dict.fromkeys(attribute.partition(".")[0] for _, attribute in targets)
    trainers = [owner.removesuffix("Trainer") for owner in owners if owner.endswith("Trainer") and owner != "Trainer"]
    parts = {"upstream": upstream, "review": review, "targets": "\n".join(lines)}
    # A target that is not a method of a trainer may be used by any trainer.
    return ENTRY.format(**{**words, "title": title}, **parts, trainers=", ".join(trainers) or '"*"')


def _docstring(title: str) -> str:
    escaped = title.rstrip(".").replace("\\", "\\\\").replace('"', '\\"')
    return "\n".join(textwrap.wrap(escaped, 110))


def _write(checkout: Path, texts: dict[Path, str], longer: str) -> None:
    """Write the new files and the longer ``patches.yaml``, or none of them."""
    manifest = checkout / "patches.yaml"
    partial = manifest.with_name(f".patches.yaml.{os.getpid()}.partial")
    written = [partial]
    try:
        for path, text in texts.items():
            (checkout / path).parent.mkdir(parents=True, exist_ok=True)
            with (checkout / path).open("x", encoding="utf-8") as file:
                written.append(checkout / path)
                file.write(text)
        importlib.invalidate_caches()
        # This imports the new module too, so that the command line works afterwards.
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
            raise click.ClickException(f"the new entry is invalid; nothing was written. {error}") from None
        raise
