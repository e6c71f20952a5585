"""Answers by key, in ``.bench/relations``. A claim that called the same code of TRL has the same answer in a release.

The key of a claim has the claim itself, the recipe, the code that makes, runs and compares, and the stack. An answer
also has the functions of TRL that its runs called, and the patches that were on in their modules: it is known in each
place where these are equal.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from trl_hotfix.catalogue import loading
from trl_hotfix.relations import by_hand, forms, odd_models
from trl_hotfix.relations.changes import CHANGES, change_of
from trl_hotfix.relations.claims import Claim
from trl_hotfix.relations.recipes import Recipe

from bench.releases import layout, trl_code
from bench.releases.layout import BENCH, Place
from bench.results import keys

Answer = dict[str, Any]
ROOM = "trl_hotfix.relations"
MACHINE = (("cells", "Runs"), ("cells", "asked"), ("recipes", "Recipe"))
"""What makes and runs, with all that it uses. It has no relation, no recipe and no kind of claim."""


def key(recipe: Recipe, relation: str, claim: Claim, place: Place, *, on: bool, overlays: Iterable[str] = ()) -> str:
    """Return the key of our part in an answer: without TRL's code and without patches."""
    special = layout.settings()["special"].get(place.release, {})
    ours = [_machine(type(claim).__name__), _data(recipe), relation, str(claim), *_of_claim(claim)]
    beside = [layout.settings()["overlays"][name] for name in overlays]
    return keys.digest_of([*ours, layout.stack_key(place.stack), beside, special, on])


def _of_claim(claim: Claim) -> list[Any]:
    """Return the code of the forms, changes and formula of a claim that are in a module of their own, and its models.

    What ``forms`` and ``by_hand`` have themselves belongs to the machine.
    """
    tables = (forms.FORMS, "form"), (by_hand.FORMULAS, "by_hand")
    named = [(table, getattr(setting, field)) for setting in claim.settings for table, field in tables]
    changes = [CHANGES[change] for setting in claim.settings if (change := change_of(setting))]
    functions = [*(table[name] for table, name in named if name), *changes]
    own = [(each.__module__, each.__name__) for each in functions if each.__module__ not in _IN_THE_MACHINE]
    models = [odd_models.MODELS[name] for each in claim.settings if (name := each.architecture) in odd_models.MODELS]
    return [*([keys.SOURCES.code(own)] if own else []), *models]


_IN_THE_MACHINE = (forms.__name__, by_hand.__name__)


def _data(recipe: Recipe) -> dict[str, str]:
    """Return the fields of a recipe as texts. A function stands there by its name, not by its address."""
    values = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(recipe)}
    return {name: getattr(value, "__qualname__", repr(value)) for name, value in values.items()}


def find(key: str, place: Place, *, on: bool) -> Answer | None:
    """Return an answer with this key whose code of TRL, and whose patches, are those of the place."""
    for answer in _read(key):
        calls = answer["calls"]
        if answer["trl"] == _of_trl(calls, place) and answer["patches"] == _patches(calls, place, on):
            return answer
    return None


def keep(key: str, place: Place, found: Answer, *, on: bool) -> Answer:
    """Add what a place has answered, and return it."""
    answer = {
        **found,
        "trl": _of_trl(found["calls"], place),
        "patches": _patches(found["calls"], place, on),
        "ran": str(place),
    }
    file = _file(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(answer) + "\n")
    return answer


def _read(key: str) -> Iterator[Answer]:
    file = _file(key)
    yield from map(json.loads, file.read_text(encoding="utf-8").splitlines() if file.is_file() else ())


def _file(key: str) -> Path:
    return BENCH / "relations" / f"{key}.jsonl"


def _of_trl(calls: Iterable[str], place: Place) -> str:
    # Without a call there was no trainer: the release is then the reason.
    return trl_code.key(place.release, calls) if calls else place.release


def _patches(calls: Iterable[str], place: Place, on: bool) -> list[list[str]]:
    """Return the patches that are on in the modules of these calls, each with a digest of its code."""
    modules = frozenset(call.partition(":")[0] for call in calls)
    return [list(pair) for pair in _patches_on(modules, place)] if on else []


@functools.lru_cache(maxsize=2000)
def _patches_on(modules: frozenset[str], place: Place) -> tuple[tuple[str, str], ...]:
    return tuple(
        (patch.id, keys.cell_key(patch, place))
        for patch in loading.load()
        if any(target.module in modules for target in place.targets_of(patch))
    )


@functools.cache
def _machine(kind_of_claim: str) -> str:
    pieces = [*MACHINE, ("claims", kind_of_claim)]
    return keys.digest_of(keys.SOURCES.code([(f"{ROOM}.{module}", name) for module, name in pieces]))
