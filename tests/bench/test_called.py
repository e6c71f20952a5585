"""What the catalogue declares of when a target is called is what was seen on real trainers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
from packaging.version import Version

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Called, Patch, Target

from bench.inside import called
from bench.proving.running import process
from bench.releases import layout
from bench.results import declared
from bench.results.declared import Seen, disagreement, seen
from helpers import sharing

SECONDS_A_CASE = 200
STACKS = dict.fromkeys(("0.13.0", "0.14.0", "0.15.0"), "tf4.51")
"""Releases that are not run on their main stack.

A newer transformers is required by preference-grad-accum-scaling and grpo-model-generation-config-leak.
"""

PLACES = [layout.Place(release, STACKS.get(release, layout.main_place(release).stack)) for release in called.CASES]
ENTRIES = [(patch, target) for patch in loading.load() for target in patch.targets]


def in_range(patch: Patch, target: Target, place: layout.Place) -> bool:
    return target in place.targets_of(patch)


def place_of(patch: Patch, target: Target) -> layout.Place | None:
    """Return the place in which the target must be called as declared: the newest of its range, or ``ELSEWHERE``."""
    places = [place for place in PLACES if in_range(patch, target, place)]
    chosen = [place for place in places if place.release == called.ELSEWHERE.get(target.name)]
    return max(chosen or places, key=lambda place: Version(place.release), default=None)


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Mapping[layout.Place, Any]:
    """Return the answers of each place, by case."""
    places = list(dict.fromkeys(case["place"] for case in sharing.parameters(request)))
    layout.build(places)

    def run(place: layout.Place) -> Any:
        cases = cases_of(place)
        # BCO does not start without scikit-learn.
        command = ["-m", "bench.inside.called", "{out}", str(SECONDS_A_CASE), *cases]
        return process(place, command, 60 + SECONDS_A_CASE * len(cases), "scikit-learn")

    return sharing.side_by_side(run, places)


def cases_of(place: layout.Place) -> list[str]:
    return [case for case in called.CASES[place.release] if (str(place), case) not in called.CANNOT_RUN]


@pytest.mark.parametrize("place", sharing.heavy(PLACES), ids=str)
def test_every_target_is_called_when_the_catalogue_says(
    answers: Mapping[layout.Place, Any], place: layout.Place
) -> None:
    assert not isinstance(answers[place], str), answers[place]
    failed = {case: answer for case, answer in answers[place].items() if isinstance(answer, str)}
    assert not failed, "\n".join(f"{case}: {answer}" for case, answer in failed.items())
    assert answers[place].keys() == set(cases_of(place))
    wrong = []
    for patch, target in ENTRIES:
        if not in_range(patch, target, place) or target.called is None:
            continue
        observed = seen(target.name, answers[place].values())
        if (patch.id, target.name) in called.UNREACHED:
            found = "it was called, so it is superfluous in UNREACHED" if observed.moments else None
        elif place_of(patch, target) == place:
            found = disagreement(target.called, observed)
        else:
            found = declared.contradiction(target.called, observed)
        if found:
            wrong.append(f"{patch.id}, {target.name}, {target.called.value}: {found}")
    assert not wrong, "\n".join(wrong)


def test_every_target_of_the_catalogue_declares_when_it_is_called() -> None:
    assert [target.name for _, target in ENTRIES if target.called is None] == []


def test_every_moment_is_in_the_docs() -> None:
    text = (layout.CHECKOUT / "docs" / "add-a-patch.md").read_text()
    assert [called.value for called in Called if f"`{called.value}`" not in text] == []


def test_every_target_has_a_place_where_it_is_called_or_a_reason() -> None:
    without = {(patch.id, target.name) for patch, target in ENTRIES if place_of(patch, target) is None}
    assert without <= called.UNREACHED.keys()
    assert called.UNREACHED.keys() <= {(patch.id, target.name) for patch, target in ENTRIES}
    assert set(called.ELSEWHERE) <= {target.name for _, target in ENTRIES}


def test_no_release_is_named_elsewhere_without_need() -> None:
    newest = {
        (
            target.name,
            max((place for place in PLACES if in_range(patch, target, place)), key=lambda p: Version(p.release)),
        )
        for patch, target in ENTRIES
        if target.name in called.ELSEWHERE and place_of(patch, target) is not None
    }
    for name, release in called.ELSEWHERE.items():
        assert any(place.release != release for other, place in newest if other == name), name


def of(constructions: tuple[int, ...] = (), steps: tuple[tuple[int, int], ...] = (), **moments: int) -> Seen:
    return Seen(Counter(moments), list(constructions), [(calls, made, False) for calls, made in steps])


GOOD = {
    Called.CONSTRUCTION: of((1, 2), construction=3),
    Called.SOME_CONSTRUCTIONS: of((1, 0), construction=1),
    Called.PREPARATION: of((1, 1), dataloader=1, construction=1, evaluate=1),
    Called.DATA: of((0,), ((2, 0),), data=4),
    Called.STEP: of((0,), ((2, 0), (1, 1)), step=3, evaluation=1),
    Called.SOME_STEPS: of((0,), ((2, 0), (0, 1)), step=3, evaluation=1, training=1),
    Called.EVALUATION: of((0,), ((0, 0),), evaluation=2),
    Called.GENERATION: of((0,), ((2, 2), (0, 0)), step=2, evaluation=1),
    Called.SAVE: of((0,), ((0, 0),), save=2),
    Called.RESUME: of((0,), ((0, 0),), resume=2),
    Called.IMPORT: Seen(Counter({"import": 1})),
}
"""For each declaration, calls that are as declared."""


@pytest.mark.parametrize("called", Called)
def test_calls_as_declared_agree(called: Called) -> None:
    assert disagreement(called, GOOD[called]) is None


@pytest.mark.parametrize("called", Called)
def test_a_target_that_was_not_called_disagrees_and_contradicts_nothing(called: Called) -> None:
    nothing = of((0,), ((0, 0),))
    assert disagreement(called, nothing) == "it was not called"
    if called not in (Called.STEP, Called.CONSTRUCTION):
        assert declared.contradiction(called, nothing) is None


@pytest.mark.parametrize("called", Called)
def test_each_declaration_refuses_the_calls_of_every_other(called: Called) -> None:
    # What is called in some steps only, in those that generate, may be declared less precisely.
    weaker = {Called.SOME_STEPS: {Called.GENERATION}, Called.PREPARATION: {Called.CONSTRUCTION}}
    weaker[Called.PREPARATION] |= {Called.SOME_CONSTRUCTIONS}
    for other, calls in GOOD.items():
        if other is not called and other not in weaker.get(called, ()):
            assert disagreement(called, calls) is not None, other


@pytest.mark.parametrize(
    ("called", "calls", "found"),
    [
        (Called.STEP, of((0,), ((2, 0), (0, 0)), step=2), "1 of 2 steps did not call it"),
        (Called.STEP, of((0,), ((2, 0),), step=2, save=1), "it was called in: save"),
        (Called.STEP, of((0,), (), evaluation=2), "0 of 0 steps did not call it"),
        (Called.CONSTRUCTION, of((1, 0), construction=1), "1 of 2 constructions did not call it"),
        (Called.SOME_CONSTRUCTIONS, of((1, 1), construction=2), "every construction called it"),
        (Called.SOME_STEPS, of((0,), ((1, 0), (1, 0)), step=2), "every step called it"),
        (Called.SOME_STEPS, of((0,), ((0, 0),), evaluation=2), "training did not call it"),
        (Called.EVALUATION, of((0,), ((1, 0),), step=1, evaluation=2), "it was called in: step"),
        (Called.GENERATION, of((0,), ((1, 0), (0, 1)), step=1), "a step called it and generated nothing"),
        (Called.GENERATION, of((0,), ((1, 1), (1, 1)), step=2), "every step called it"),
    ],
    ids=str,
)
def test_a_wrong_declaration_is_told_apart(called: Called, calls: Seen, found: str) -> None:
    assert disagreement(called, calls) == found


def test_a_generation_by_vllm_is_not_counted() -> None:
    calls = of((0,), ((0, 0),), step=1)
    calls.steps.append((1, 0, True))
    assert disagreement(Called.GENERATION, calls) is None


@pytest.mark.parametrize("called", [Called.SOME_STEPS, Called.GENERATION])
def test_in_other_places_some_steps_may_be_every_step(called: Called) -> None:
    assert declared.contradiction(called, of((0,), ((1, 1), (1, 1)), step=2)) is None
