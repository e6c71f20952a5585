"""The bodies of what TRL's classes inherit from transformers, by its release: ``data/transformers.json``.

TRL's wheel shows that ``CPOTrainer`` inherits ``training_step``, and the record has its body in transformers 5.2.0.
``tools/transformers_record.py`` writes it.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterable, Mapping
from typing import TypedDict

from packaging.version import Version

from ..catalogue.data_files import data_file, decoded
from ..model import Target
from .digests import digest, parse
from .sources import Release

PACKAGE = "transformers"

FILES = {
    "Trainer": "trainer.py",
    "TrainerCallback": "trainer_callback.py",
    "TrainingArguments": "training_args.py",
}
"""The classes on record, with the file of transformers that defines each."""


class Record(TypedDict):
    """The releases on record, oldest first, and the changes of the body of each method as (release, body).

    A body is None from where the method is gone. Between two releases on record nothing is known.
    """

    releases: list[str]
    bodies: dict[str, list[tuple[str, str | None]]]


def body_of(base: str | None, release: str | None) -> str | None:
    """Return the body of a method such as ``transformers:Trainer.training_step`` in a release, or None if not known."""
    package, _, method = (base or "").partition(":")
    record = _record()
    if package != PACKAGE or release not in record["releases"]:
        return None
    return _at(record, method, record["releases"].index(release))


def body_in(release: Release, target: Target, transformers: str | None) -> str | None:
    """Return the body that ``target`` has in these files of TRL, or inherits in this version of transformers."""
    own = release.body(target.module, target.attribute)
    return own if own is not None else body_of(release.inherits(target.module, target.attribute), transformers)


def is_inherited(release: Release, module: str, attribute: str) -> bool:
    """Return whether TRL's class has ``attribute`` from a class of transformers that is on record with it."""
    base = release.inherits(module, attribute)
    return base is not None and bool(bodies_of(base))


def may_be_inherited(release: Release, module: str, attribute: str) -> bool:
    """Return whether TRL's class may have ``attribute`` from a class of another package."""
    package, _, method = (release.inherits(module, attribute) or "").partition(":")
    is_on_record = package == PACKAGE and method.partition(".")[0] in FILES
    return bool(bodies_of(f"{package}:{method}")) if is_on_record else bool(package)


def releases() -> list[str]:
    """Return the releases of transformers on record, oldest first."""
    return _record()["releases"]


def bodies_of(base: str) -> set[str]:
    """Return all bodies on record of a method."""
    package, _, method = base.partition(":")
    changes = _record()["bodies"].get(method, []) if package == PACKAGE else []
    return {body for _, body in changes if body is not None}


def read(texts: Mapping[str, str]) -> dict[str, str]:
    """Return the body of each method of the classes on record, from the texts of their files."""
    bodies: dict[str, str] = {}
    for name, file in FILES.items():
        for definition in parse(texts[file]).body:
            if isinstance(definition, ast.ClassDef) and definition.name == name:
                methods = (each for each in definition.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))
                bodies |= {f"{name}.{method.name}": digest(method) for method in methods}
    return bodies


def recorded(by_release: Mapping[str, Mapping[str, str]]) -> Record:
    """Return the record of these releases."""
    releases = sorted(by_release, key=Version)
    bodies: dict[str, list[tuple[str, str | None]]] = {}
    for method in sorted({method for of_release in by_release.values() for method in of_release}):
        changes = bodies.setdefault(method, [])
        for release in releases:
            body = by_release[release].get(method)
            if body != (changes[-1][1] if changes else None):
                changes.append((release, body))
    return {"releases": releases, "bodies": bodies}


def by_release(record: Record) -> dict[str, dict[str, str]]:
    """Return the bodies of a record again, by release."""
    return {
        release: {method: body for method in record["bodies"] if (body := _at(record, method, index)) is not None}
        for index, release in enumerate(record["releases"])
    }


def as_text(record: Record) -> str:
    """Return the content of the file, a line for each method."""
    lines = (f"  {json.dumps(method)}: {json.dumps(changes)}" for method, changes in record["bodies"].items())
    return f'{{\n "releases": {json.dumps(record["releases"])},\n "bodies": {{\n' + ",\n".join(lines) + "\n }\n}\n"


def _at(record: Record, method: str, index: int) -> str | None:
    until: Iterable[str] = record["releases"][: index + 1]
    changes = dict(record["bodies"].get(method, ()))
    return next((changes[release] for release in reversed([*until]) if release in changes), None)


@functools.cache
def _record() -> Record:
    record: Record = decoded(data_file("transformers.json"), Record)
    return record
