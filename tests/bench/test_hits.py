"""What ``hits`` says of trainers and arguments is so in the real releases, whose sources are read, and not imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from trl_hotfix.catalogue import conditions, loading
from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.matching import versions
from trl_hotfix.model import Hit
from trl_hotfix.scanning.trainer_calls import POSITIONAL_ARGUMENTS, TRAINER_ONLY_ARGUMENTS
from trl_hotfix.scanning.yaml_configs import DISTINCTIVE_KEYS

import layout

HITS = [
    pytest.param(patch.trl, hit, id=f"{patch.id}-{number}")
    for patch in loading.load()
    for number, hit in enumerate(patch.hits)
]
NOTHING = object()

Defaults = Mapping[str, Any]
"""Each argument with its default, or NOTHING where that is no literal."""


class Class(NamedTuple):
    """What is read of a class. Not the syntax trees: those of all releases are gigabytes."""

    name: str
    bases: tuple[str, ...]
    fields: Defaults
    positional: tuple[str, ...]
    """What ``__init__`` takes by position, without ``self``; empty if it has none of its own."""
    parameters: frozenset[str]


def parsed(file: Path) -> Iterator[Class]:
    for each in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(each, ast.ClassDef):
            made = next((its for its in each.body if isinstance(its, ast.FunctionDef) and its.name == "__init__"), None)
            positional = tuple(part.arg for part in made.args.args[1:]) if made is not None else ()
            keywords = {part.arg for part in made.args.kwonlyargs} if made is not None else set()
            bases = tuple(base.id for base in each.bases if isinstance(base, ast.Name))
            yield Class(each.name, bases, fields(each), positional, frozenset({*positional, *keywords}))


@functools.cache
def classes(release: str) -> dict[str, list[Class]]:
    """The trainers and configs of a release, by name: there may be one in ``trl.trainer`` and one in experimental."""
    folder = layout.BENCH / "overlay" / release / "trl"
    found: dict[str, list[Class]] = {}
    for file in [*folder.glob("trainer/*.py"), *folder.glob("experimental/**/*.py")]:
        if file.stem.endswith(("_trainer", "_config", "__init__")):
            for each in parsed(file):
                found.setdefault(each.name, []).append(each)
    return found


@functools.cache
def of_transformers() -> frozenset[str]:
    """The fields of TrainingArguments in any of the stacks."""
    files = [*layout.BENCH.glob("stacks/*/lib/python3*/site-packages/transformers/training_args.py")]
    assert files
    each = [part for file in files for part in parsed(file) if part.name == "TrainingArguments"]
    return frozenset(name for definition in each for name in definition.fields)


def fields(definition: ast.ClassDef) -> Defaults:
    own = [each for each in definition.body if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)]
    return {each.target.id: default(each.value) for each in own if isinstance(each.target, ast.Name)}


def default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        given = {each.arg: each.value for each in node.keywords}
        node = given.get("default") or given.get("default_factory")
    if isinstance(node, ast.Lambda):
        node = node.body
    try:
        return ast.literal_eval(node) if node is not None else NOTHING
    except ValueError:
        return NOTHING


@functools.cache
def config(release: str, name: str) -> Defaults:
    found: dict[str, Any] = {}
    for definition in classes(release).get(name, []):
        for base in definition.bases:
            if base != name:
                found |= config(release, base)
        found |= definition.fields
    return found


def trainer(release: str, name: str) -> set[str]:
    return {each for definition in classes(release).get(name, []) for each in definition.parameters}


def releases(*ranges: str | None) -> list[str]:
    wanted = [each for each in ranges if each is not None]
    return [release for release in layout.releases() if all(versions.in_range(release, each) for each in wanted)]


def trainers(hit: Hit) -> tuple[str, ...]:
    return hit.trainers if hit.trainers != ("*",) else ("SFT", "DPO", "GRPO")


def test_every_patch_says_what_its_bug_needs() -> None:
    assert [patch.id for patch in loading.load() if not patch.hits] == []


@pytest.mark.parametrize(("trl", "hit"), HITS)
def test_the_trainers_and_the_arguments_are_in_a_release_of_the_range(everywhere: None, trl: str, hit: Hit) -> None:
    here = releases(trl, hit.trl)
    for name in trainers(hit):
        assert any(f"{name}Trainer" in classes(each) for each in here), name
        for argument in {each.partition(".")[0] for each in hit.when}:
            assert argument in of_transformers() or any(
                argument in trainer(each, f"{name}Trainer") or argument in config(each, f"{name}Config")
                for each in here
            ), (name, argument)


@pytest.mark.parametrize(("trl", "hit"), HITS)
def test_an_argument_that_is_not_given_is_what_its_default_is(everywhere: None, trl: str, hit: Hit) -> None:
    """Where a literal would do, and the default is one, both have the same answer."""
    unset = Argument(Kind.UNSET)
    for release in releases(trl, hit.trl):
        for name in trainers(hit):
            for argument, wanted in hit.when.items():
                value = config(release, f"{name}Config").get(argument, NOTHING)
                if value is NOTHING or value is None or wanted in ("set", "unset"):
                    continue
                given = Argument(Kind.LITERAL, value)
                here = (release, name, argument, value)
                answers = [conditions.evaluate(wanted, each, lambda _: unset) for each in (given, unset)]
                assert answers[0] == answers[1], here


def test_what_only_a_trainer_takes_is_in_no_config(everywhere: None) -> None:
    for release in layout.releases():
        for name in ("SFT", "DPO", "GRPO", "KTO", "RLOO", "OnlineDPO", "GKD", "ORPO", "CPO", "BCO", "Reward", "PRM"):
            assert not TRAINER_ONLY_ARGUMENTS & set(config(release, f"{name}Config")), (release, name)


def test_what_is_given_by_position_is_there_in_every_release(everywhere: None) -> None:
    for release in layout.releases():
        for name, order in POSITIONAL_ARGUMENTS.items():
            for definition in classes(release).get(f"{name}Trainer", []):
                first = definition.positional
                # RLOO was another trainer up to 0.21, of which the catalogue knows no bug.
                assert first[: len(order)] == order or "policy" in first or not first, (release, name)


@pytest.mark.parametrize("name", DISTINCTIVE_KEYS)
def test_the_keys_that_tell_a_trainer_are_of_no_other(everywhere: None, name: str) -> None:
    for sign in DISTINCTIVE_KEYS[name]:
        having = {
            each
            for release in layout.releases()
            for each in DISTINCTIVE_KEYS
            if sign in config(release, f"{each}Config") and classes(release).get(f"{each}Config")
        }
        assert having == {name}, (sign, having)
