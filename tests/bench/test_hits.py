"""The trainers and arguments in ``hits`` exist in the real releases, whose sources are parsed, not imported."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest

from trl_hotfix.catalogue import conditions, loading
from trl_hotfix.catalogue.conditions import Argument, Kind
from trl_hotfix.matching import versions
from trl_hotfix.model import Hit, Patch
from trl_hotfix.scanning.trainer_calls import POSITIONAL_ARGUMENTS, TRAINER_ONLY_ARGUMENTS
from trl_hotfix.scanning.yaml_configs import DISTINCTIVE_KEYS

from bench.releases import layout

HITS = [
    pytest.param(patch, hit, id=f"{patch.id}-{number}")
    for patch in loading.load()
    for number, hit in enumerate(patch.hits)
]
OF_ONE_RELEASE = {("0.14.0", "GRPO", "gradient_accumulation_steps")}
"""Defaults that one trainer of one release has. A hit for this release says what the missing argument means there."""
NOTHING = object()

Defaults = Mapping[str, Any]
"""Each argument with its default, or NOTHING if that is not a literal."""


class Class(NamedTuple):
    """The parts of a class that the tests need, without its syntax tree: the trees of all releases are gigabytes."""

    name: str
    bases: tuple[str, ...]
    fields: Defaults
    positional: tuple[str, ...]
    """Positional parameters of ``__init__``, without ``self``; empty if the class has no ``__init__`` of its own."""
    parameters: frozenset[str]


@functools.cache
def classes_in(source: str) -> tuple[Class, ...]:
    """Return the classes of a source text. Many releases have the same file."""
    return tuple(parsed(source))


def parsed(source: str) -> Iterator[Class]:
    for definition in ast.parse(source).body:
        if isinstance(definition, ast.ClassDef):
            constructor = next(
                (
                    statement
                    for statement in definition.body
                    if isinstance(statement, ast.FunctionDef) and statement.name == "__init__"
                ),
                None,
            )
            positional = tuple(part.arg for part in constructor.args.args[1:]) if constructor is not None else ()
            keywords = {part.arg for part in constructor.args.kwonlyargs} if constructor is not None else set()
            bases = tuple(base.id for base in definition.bases if isinstance(base, ast.Name))
            yield Class(definition.name, bases, fields(definition), positional, frozenset({*positional, *keywords}))


@functools.cache
def classes(release: str) -> dict[str, list[Class]]:
    """Return the trainers and configs of a release by name: ``trl.trainer`` and experimental may each have one."""
    folder = layout.BENCH / "overlay" / release / "trl"
    by_name: dict[str, list[Class]] = {}
    for file in [*folder.glob("trainer/*.py"), *folder.glob("experimental/**/*.py")]:
        if file.stem.endswith(("_trainer", "_config", "__init__")):
            for definition in classes_in(file.read_text(encoding="utf-8")):
                by_name.setdefault(definition.name, []).append(definition)
    return by_name


@functools.cache
def of_transformers() -> frozenset[str]:
    """Return the fields of TrainingArguments in any of the stacks, with those of the newest release."""
    layout.build(place for place in layout.places() if place.release == layout.releases()[-1])
    files = [*layout.BENCH.glob("stacks/*/lib/python3*/site-packages/transformers/training_args.py")]
    assert files
    texts = [file.read_text(encoding="utf-8") for file in files]
    definitions = [part for text in texts for part in classes_in(text) if part.name == "TrainingArguments"]
    return frozenset(name for definition in definitions for name in definition.fields)


def fields(definition: ast.ClassDef) -> Defaults:
    annotated = [
        statement
        for statement in definition.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    ]
    return {
        statement.target.id: default(statement.value)
        for statement in annotated
        if isinstance(statement.target, ast.Name)
    }


def default(node: ast.expr | None) -> Any:
    if isinstance(node, ast.Call):
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        node = keywords.get("default") or keywords.get("default_factory")
    if isinstance(node, ast.Lambda):
        node = node.body
    try:
        return ast.literal_eval(node) if node is not None else NOTHING
    except ValueError:
        return NOTHING


@functools.cache
def config(release: str, name: str) -> Defaults:
    defaults: dict[str, Any] = {}
    for definition in classes(release).get(name, []):
        for base in definition.bases:
            if base != name:
                defaults |= config(release, base)
        defaults |= definition.fields
    return defaults


def trainer(release: str, name: str) -> set[str]:
    return {parameter for definition in classes(release).get(name, []) for parameter in definition.parameters}


def releases(*ranges: str | None) -> list[str]:
    specifiers = [specifier for specifier in ranges if specifier is not None]
    return [
        release
        for release in layout.releases()
        if all(versions.in_range(release, specifier) for specifier in specifiers)
    ]


def trainers(hit: Hit) -> tuple[str, ...]:
    return hit.trainers if hit.trainers != ("*",) else ("SFT", "DPO", "GRPO")


def test_every_patch_declares_what_its_bug_needs() -> None:
    assert [patch.id for patch in loading.load() if not patch.hits] == []


@pytest.mark.parametrize(("patch", "hit"), HITS)
def test_trainers_and_arguments_exist_in_the_range(sources: None, patch: Patch, hit: Hit) -> None:
    in_range = releases(patch.trl, hit.trl)
    for name in trainers(hit):
        assert any(f"{name}Trainer" in classes(release) for release in in_range), name
        # ``train`` stands for the arguments of ``trainer.train()``.
        for argument in {key.partition(".")[0] for key in hit.when} - {"train"}:
            assert argument in of_transformers() or any(
                argument in trainer(release, f"{name}Trainer") or argument in config(release, f"{name}Config")
                for release in in_range
            ), (name, argument)


@pytest.mark.parametrize(("patch", "hit"), HITS)
def test_a_missing_argument_has_its_default(sources: None, patch: Patch, hit: Hit) -> None:
    """If the default is a literal, passing it and omitting the argument evaluate the same."""
    unset = Argument(Kind.UNSET)
    for release in releases(patch.trl, hit.trl):
        for name in trainers(hit):
            for argument, condition in hit.when.items():
                value = config(release, f"{name}Config").get(argument, NOTHING)
                if value is NOTHING or value is None or condition in ("set", "unset"):
                    continue
                if (release, name, argument) in OF_ONE_RELEASE and hit.trl is None:
                    of_release = [each for each in patch.hits if each.trl == f"=={release}" and name in each.trainers]
                    assert [each.when[argument] for each in of_release] == ["unset"]
                    continue
                literal = Argument(Kind.LITERAL, value)
                place = (release, name, argument, value)
                answers = [
                    conditions.evaluate(condition, argument_value, lambda _: unset)
                    for argument_value in (literal, unset)
                ]
                assert answers[0] == answers[1], place


def test_arguments_of_trainers_only_are_in_no_config(sources: None) -> None:
    for release in layout.releases():
        for name in ("SFT", "DPO", "GRPO", "KTO", "RLOO", "OnlineDPO", "GKD", "ORPO", "CPO", "BCO", "Reward", "PRM"):
            assert not TRAINER_ONLY_ARGUMENTS & set(config(release, f"{name}Config")), (release, name)


def test_positional_arguments_are_in_every_release(sources: None) -> None:
    for release in layout.releases():
        for name, order in POSITIONAL_ARGUMENTS.items():
            for definition in classes(release).get(f"{name}Trainer", []):
                positional = definition.positional
                # RLOO was another trainer up to 0.21, for which the catalogue has no patch.
                assert positional[: len(order)] == order or "policy" in positional or not positional, (release, name)


@pytest.mark.parametrize("name", DISTINCTIVE_KEYS)
def test_a_distinctive_key_belongs_to_one_trainer(sources: None, name: str) -> None:
    for key in DISTINCTIVE_KEYS[name]:
        names = {
            other_name
            for release in layout.releases()
            for other_name in DISTINCTIVE_KEYS
            if key in config(release, f"{other_name}Config") and classes(release).get(f"{other_name}Config")
        }
        assert names == {name}, (key, names)
