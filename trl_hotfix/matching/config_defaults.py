"""The defaults that TRL's own configs have, by release: read from the files of a release, and on record.

A config inherits most of its arguments from ``TrainingArguments`` of transformers. The record leaves out those that no
class of TRL defines. We do not see what ``__post_init__`` makes of a default.
"""

from __future__ import annotations

import ast
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TypedDict

from ..catalogue.data_files import data_file, decoded
from . import sources

Defaults = Mapping[str, str]
"""The default of each argument, as source text; ``REQUIRED`` for an argument without one."""

REQUIRED = "no default"

_OF_NO_TRAINER = ("ModelConfig", "BaseConfig", "SelfDistillationConfig")


class Record(TypedDict):
    """What is on record: the releases with each config, and the changes of each default as (release, default).

    A config is named by its trainer, such as ``DPO``. A default is None from where the argument is gone.
    """

    releases: dict[str, list[str]]
    changes: dict[str, dict[str, list[tuple[str, str | None]]]]


def defaults_of(release: sources.Release) -> dict[str, dict[str, str]]:
    """Return the defaults of each config that a release has, by the name of its trainer."""
    modules = [module for module in release.modules() if module.rpartition(".")[2].endswith("_config")]
    # What is not experimental comes last, and is what a name stands for.
    modules.sort(key=lambda module: (not module.startswith("trl.experimental."), module))
    configs = {}
    for module in modules:
        for name in release.classes(module):
            if name.endswith("Config") and not name.startswith("_") and name not in _OF_NO_TRAINER:
                configs[name.removesuffix("Config")] = dict(_fields(release, module, name))
    return configs


def _fields(release: sources.Release, module: str, name: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a config, those of its bases in TRL first."""
    found = release.class_definition(module, name)
    if found is None:
        return
    home, definition = found
    for base in reversed(definition.bases):
        if isinstance(base, ast.Name) and base.id != name:
            yield from _fields(release, home, base.id)
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, _default(statement.value)


def _default(value: ast.expr | None) -> str:
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "field":
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        factory = given.get("default_factory")
        if factory is not None:
            return ast.unparse(factory.body if isinstance(factory, ast.Lambda) else ast.Call(factory, [], []))
        value = given.get("default")
    return ast.unparse(value) if value is not None else REQUIRED


def recorded(by_release: Mapping[str, Mapping[str, Defaults]]) -> Record:
    """Return the defaults of all releases, which are in their order, as a record of what has changed."""
    record: Record = {"releases": {}, "changes": {}}
    for release, configs in by_release.items():
        record = extended(record, release, configs)
    return record


def extended(record: Record, release: str, configs: Mapping[str, Defaults]) -> Record:
    """Return the record with a release that is newer than all that it has."""
    releases = {config: list(names) for config, names in record["releases"].items()}
    changes = {
        config: {name: list(entries) for name, entries in arguments.items()}
        for config, arguments in record["changes"].items()
    }
    for config, defaults in configs.items():
        releases.setdefault(config, []).append(release)
        arguments = changes.setdefault(config, {})
        for name in dict.fromkeys([*arguments, *defaults]):
            entries = arguments.setdefault(name, [])
            default = defaults.get(name)
            if (entries[-1][1] if entries else None) != default:
                entries.append((release, default))
    return {"releases": releases, "changes": changes}


def as_text(record: Record) -> str:
    """Return the record as JSON with a line for each config and each argument."""
    lines = ['{"releases": {']
    lines += [f" {json.dumps(config)}: {json.dumps(names)}," for config, names in sorted(record["releases"].items())]
    lines = [*lines[:-1], lines[-1].rstrip(","), '}, "changes": {']
    for config, arguments in sorted(record["changes"].items()):
        lines.append(f" {json.dumps(config)}: {{")
        lines += [f"  {json.dumps(name)}: {json.dumps(changes)}," for name, changes in sorted(arguments.items())]
        lines = [*lines[:-1], lines[-1].rstrip(","), " },"]
    return "\n".join([*lines[:-1], " }", "}}", ""])


@functools.cache
def _record() -> Record:
    record: Record = decoded(data_file("defaults.json"), Record)
    return record


def defaults(release: str, config: str, releases: Sequence[str]) -> Defaults | None:
    """Return the defaults of the config of a trainer in a release, or None if that release has no such config.

    ``releases`` are all that are on record, in their order. Raises ``LookupError`` for a release that neither is on
    record nor installed here with its sources, and ``DamagedError``.
    """
    if release not in releases:
        here = sources.installed()
        if here is None or here.version != release:
            raise LookupError(release)
        return defaults_of(here).get(config)
    record = _record()
    if release not in record["releases"].get(config, ()):
        return None
    found = {}
    for name, changes in record["changes"][config].items():
        until = [default for since, default in changes if releases.index(since) <= releases.index(release)]
        if until and until[-1] is not None:
            found[name] = until[-1]
    return found
