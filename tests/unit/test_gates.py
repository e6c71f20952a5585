from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl_hotfix.catalogue import loading
from trl_hotfix.errors import SettingError, UnknownPatchError
from trl_hotfix.matching import gates, versions
from trl_hotfix.model import Option, Patch, Reason, Severity, State, Target, Upstream
from trl_hotfix.selection.selection import Selection

# fmt: off
RELEASES = [
    "0.9.6", "0.10.1", "0.11.0", "0.11.1", "0.11.2", "0.11.3", "0.11.4", "0.12.0", "0.12.1", "0.12.2", "0.13.0",
    "0.14.0", "0.15.0", "0.15.1", "0.15.2", "0.16.0", "0.16.1", "0.17.0", "0.18.0", "0.18.1", "0.18.2", "0.19.0",
    "0.19.1", "0.20.0", "0.21.0", "0.22.0", "0.22.1", "0.22.2", "0.23.0", "0.23.1", "0.24.0", "0.25.0", "0.25.1",
    "0.26.0", "0.26.1", "0.26.2", "0.27.0", "0.27.1", "0.27.2", "0.28.0", "0.29.0", "0.29.1", "1.0.0", "1.1.0",
    "1.2.0", "1.3.0", "1.4.0", "1.5.0", "1.5.1", "1.6.0", "1.7.0", "1.7.1", "1.8.0", "1.9.0", "1.9.1",
    "1.9.2", "1.10.0", "1.11.0", "1.12.0", "1.13.0", "1.14.0", "1.14.1", "1.14.2", "1.15.0", "1.16.0",
]
# fmt: on
"""Every release of TRL from 0.9.6 to 1.16.0."""

TARGET = Target("trl.trainer.dpo_trainer", "DPOTrainer.step", "wrapper")
PATCH = Patch(
    id="some-patch",
    revision=1,
    title="A title",
    severity=Severity.CRASH,
    trl=">=0.11.0,<0.12.0",
    upstream=Upstream(fixed_in="0.12.0"),
    why="because",
    how="so",
    targets=(TARGET,),
    self_test="self_test",
)
IDS = ("some-patch", "another-patch", "third-patch")
KNOWN = tuple(replace(PATCH, id=patch_id) for patch_id in IDS)
EVERYTHING = Selection()

some_release = st.sampled_from(RELEASES)


@st.composite
def ranges(draw: st.DrawFn) -> str:
    operators = st.sampled_from([">=", ">", "<", "<=", "==", "!=", "~="])
    parts = draw(st.lists(st.tuples(operators, some_release), max_size=3))
    return ",".join(f"{operator}{version}" for operator, version in parts)


def patch(**changes: Any) -> Patch:
    return replace(PATCH, **changes)


def having(**distributions: str) -> Callable[[str], str | None]:
    return distributions.get


def of(
    only: Any = None,
    skip: Any = None,
    environment: Mapping[str, str] | None = None,
    known: Any = KNOWN,
    options: Any = None,
) -> Selection:
    return Selection.of(only, skip, environment or {}, known, options)


# Versions


@pytest.mark.parametrize(
    ("version", "specifiers", "inside"),
    [
        ("0.11.4", ">=0.11.0,<0.12.0", True),
        ("0.12.0", ">=0.11.0,<0.12.0", False),
        ("0.10.1", ">=0.11.0,<0.12.0", False),
        ("1.0.0rc1", ">=0.29.0,<1.1.0", True),
        ("1.0.0rc1", ">=1.0.0", False),
        ("1.0.0rc1", ">=1.0.0rc1", True),
        ("1.0.0rc1", "<1.0.0", False),
        ("0.11.4+cu124", ">=0.11.0,<0.12.0", True),
        ("0.11.4+cu124", "<=0.11.4", True),
        ("0.11.4+cu124", "==0.11.4", True),
        ("0.12.0+local.1", "<0.12.0", False),
        ("0.11.4.post1", ">=0.11.4,<0.12.0", True),
        ("1.10.0", "<1.9", False),
        ("1.10.0", ">=1.9", True),
        ("v0.11.4", "==0.11.4", True),
    ],
)
def test_a_version_is_in_its_range_or_not(version: str, specifiers: str, inside: bool) -> None:
    assert versions.in_range(version, specifiers) is inside


@given(some_release, ranges())
def test_in_range_is_what_packaging_says(version: str, specifiers: str) -> None:
    assert versions.in_range(version, specifiers) == (Version(version) in SpecifierSet(specifiers))


@given(some_release, ranges())
def test_a_patch_waits_for_its_module_if_and_only_if_the_release_is_in_range(version: str, specifiers: str) -> None:
    decision = gates.decide(patch(trl=specifiers), EVERYTHING, having(trl=version))
    assert (decision.state is State.PENDING) == SpecifierSet(specifiers).contains(version)


@pytest.mark.parametrize("version", RELEASES)
def test_every_release_of_the_list_is_supported(version: str) -> None:
    assert versions.SUPPORTED.contains(version)


@pytest.mark.parametrize("shipped", loading.load(), ids=lambda release: release.id)
def test_every_shipped_patch_has_a_release_that_it_is_for(shipped: Patch) -> None:
    without_requirements = replace(shipped, requires={})
    assert any(
        gates.applicability(without_requirements, having(trl=release)).state is State.PENDING for release in RELEASES
    )


@pytest.mark.parametrize("shipped", loading.load(), ids=lambda release: release.id)
def test_no_shipped_patch_is_for_a_release_that_has_the_fix(shipped: Patch) -> None:
    fixed_in = shipped.upstream.fixed_in
    fixed = [release for release in RELEASES if fixed_in is not None and Version(release) >= Version(fixed_in)]
    assert [
        release for release in fixed if gates.targets_for(shipped, release) and versions.in_range(release, shipped.trl)
    ] == []


def test_the_version_of_what_is_not_installed_is_none() -> None:
    assert versions.installed("no-such-distribution-anywhere") is None


def test_the_version_of_what_is_installed_comes_from_its_metadata() -> None:
    names = [distribution.metadata["Name"] for distribution in metadata.distributions()]
    assert {name: versions.installed(name) for name in names} == {name: metadata.version(name) for name in names}


# fits


def test_a_patch_that_fits_is_pending_with_what_was_seen() -> None:
    decision = gates.applicability(PATCH, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.PENDING, Reason.APPLIES)
    assert decision.evidence == {"installed": "0.11.4", "range": ">=0.11.0,<0.12.0"}
    assert not decision.degraded


def test_without_trl_a_patch_is_skipped() -> None:
    decision = gates.applicability(PATCH, having())
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.NO_TRL)


def test_an_older_release_is_skipped() -> None:
    decision = gates.applicability(PATCH, having(trl="0.10.1"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.TRL_VERSION)
    assert decision.evidence == {"installed": "0.10.1", "range": ">=0.11.0,<0.12.0"}
    assert not decision.degraded


@pytest.mark.parametrize("version", ["0.12.0", "0.12.1", "1.0.0rc1", "1.16.0"])
def test_a_release_with_the_fix_retires_the_patch(version: str) -> None:
    decision = gates.applicability(PATCH, having(trl=version))
    assert (decision.state, decision.reason) == (State.RETIRED, Reason.FIXED_UPSTREAM)
    assert decision.evidence["fixed_in"] == "0.12.0"


def test_a_pre_release_of_the_fixed_version_does_not_retire_the_patch() -> None:
    assert gates.applicability(PATCH, having(trl="0.12.0rc1")).state is State.SKIPPED


@pytest.mark.parametrize("version", ["0.10.1+ours", "0.12.0.dev0", "0.12.0+ours", "1.17.0.dev0"])
def test_what_is_no_release_is_left_to_its_bodies(version: str) -> None:
    decision = gates.applicability(PATCH, having(trl=version))
    assert (decision.state, decision.reason) == (State.PENDING, Reason.BODY_DECIDES)


def test_without_a_fixed_version_a_later_release_is_skipped() -> None:
    decision = gates.applicability(patch(upstream=Upstream()), having(trl="1.0.0"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.TRL_VERSION)


def test_a_requirement_that_is_met_lets_the_patch_on() -> None:
    wanting = patch(requires={"deepspeed": ">=0.14.5", "torch": "<3"})
    assert (
        gates.applicability(wanting, having(trl="0.11.4", deepspeed="0.15.0", torch="2.6.0+cpu")).state is State.PENDING
    )


def test_a_requirement_that_is_absent_skips_the_patch() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.REQUIREMENT)
    assert decision.evidence["requires"] == "deepspeed>=0.14.5"
    assert decision.evidence["found"] is None


def test_a_requirement_of_another_version_skips_the_patch_and_says_which() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.11.4", deepspeed="0.14.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.REQUIREMENT)
    assert decision.evidence["found"] == "0.14.4"


def test_the_release_is_looked_at_before_the_requirements() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.12.0"))
    assert decision.state is State.RETIRED


def test_nobody_is_asked_for_what_a_patch_does_not_need() -> None:
    asked = []

    def version_of(distribution: str) -> str:
        asked.append(distribution)
        return "0.11.4"

    gates.applicability(PATCH, version_of)
    assert asked == ["trl"]


# Targets


def test_a_target_is_in_the_range_of_its_patch() -> None:
    assert gates.targets_for(PATCH, "0.11.0") == (TARGET,)
    assert gates.targets_for(PATCH, "0.12.0") == ()


def test_a_target_narrows_the_range_of_its_patch() -> None:
    old = replace(TARGET, module="trl.trainer.old", trl=">=0.11.0,<0.11.2")
    new = replace(TARGET, module="trl.trainer.new", trl=">=0.11.2,<0.12.0")
    moved = patch(targets=(old, new, TARGET))
    assert gates.targets_for(moved, "0.11.1") == (old, TARGET)
    assert gates.targets_for(moved, "0.11.2") == (new, TARGET)


def test_a_patch_without_a_target_in_this_release_does_not_fit() -> None:
    narrow = patch(targets=(replace(TARGET, trl="<0.11.2"),))
    decision = gates.applicability(narrow, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.TRL_VERSION)


def test_a_target_does_not_widen_the_range_of_its_patch() -> None:
    wide = patch(upstream=Upstream(), targets=(replace(TARGET, trl=">=0.9.6"),))
    assert gates.applicability(wide, having(trl="1.0.0")).state is State.SKIPPED


# Selection


def test_without_arguments_and_environment_everything_is_selected() -> None:
    assert of() == Selection(only=None, skip=frozenset())


def test_the_environment_selects() -> None:
    selection = of(environment={"TRL_HOTFIX_ONLY": " some-patch ,third-patch,", "TRL_HOTFIX_SKIP": "third-patch"})
    assert selection == Selection(only=frozenset({"some-patch", "third-patch"}), skip=frozenset({"third-patch"}))


def test_an_argument_wins_over_the_environment() -> None:
    environment = {"TRL_HOTFIX_ONLY": "some-patch", "TRL_HOTFIX_SKIP": "third-patch"}
    selection = of(only=["another-patch"], skip=["some-patch"], environment=environment)
    assert selection == Selection(only=frozenset({"another-patch"}), skip=frozenset({"some-patch"}))


def test_one_argument_leaves_the_other_variable_as_it_is() -> None:
    assert of(only=["some-patch"], environment={"TRL_HOTFIX_SKIP": "third-patch"}).skip == {"third-patch"}


def test_an_empty_argument_is_an_argument() -> None:
    environment = {"TRL_HOTFIX_ONLY": "some-patch", "TRL_HOTFIX_SKIP": "third-patch"}
    assert of(only=[], skip=[], environment=environment) == Selection(only=frozenset(), skip=frozenset())


@pytest.mark.parametrize("value", ["", " ", ",", " , ,"])
def test_an_empty_variable_is_none(value: str) -> None:
    assert of(environment={"TRL_HOTFIX_ONLY": value, "TRL_HOTFIX_SKIP": value}) == Selection()


def test_a_wrong_variable_is_not_read_where_there_is_an_argument() -> None:
    assert of(only=["some-patch"], environment={"TRL_HOTFIX_ONLY": "nonsense"}).only == {"some-patch"}


def test_a_single_id_may_stand_without_a_list() -> None:
    assert of(only="some-patch", skip="third-patch") == Selection(frozenset({"some-patch"}), frozenset({"third-patch"}))


def test_any_iterable_of_ids_will_do() -> None:
    assert of(only=(patch_id for patch_id in IDS)).only == set(IDS)


def test_an_unknown_id_is_refused_with_the_one_that_was_meant() -> None:
    with pytest.raises(UnknownPatchError, match=r"unknown patch in only=: 'some-pach'; did you mean 'some-patch'\?"):
        of(only=["some-pach"])


def test_an_unknown_id_in_the_environment_is_refused_with_the_name_of_the_variable() -> None:
    with pytest.raises(UnknownPatchError, match=r"TRL_HOTFIX_SKIP: 'anothr-patch'; did you mean 'another-patch'\?"):
        of(environment={"TRL_HOTFIX_SKIP": "some-patch,anothr-patch"})


def test_every_unknown_id_is_named() -> None:
    with pytest.raises(UnknownPatchError) as caught:
        of(skip=["zzzz", "some-patch", "qqqq"])
    assert caught.value.unknown == ("qqqq", "zzzz")


def test_an_id_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(UnknownPatchError, match=r"skip=: 'zzzz'\. "):
        of(skip=["zzzz"])


# Options

OVER = Option({"sequence": "the paper's", "global": "every token"}, "sequence")
WITH_OPTION = replace(PATCH, options={"over": OVER})
OTHERS = (WITH_OPTION, *KNOWN[1:])


def test_an_option_is_the_default_unless_it_is_chosen() -> None:
    assert of(known=OTHERS).options_of(WITH_OPTION) == {"over": "sequence"}
    chosen = of(known=OTHERS, options={"some-patch": {"over": "global"}})
    assert chosen.options_of(WITH_OPTION) == {"over": "global"}
    assert chosen.options_of(KNOWN[1]) == {}


def test_options_are_read_from_the_environment() -> None:
    environment = {"TRL_HOTFIX_OPTIONS": " some-patch.over = global ,"}
    assert of(environment=environment, known=OTHERS).options_of(WITH_OPTION) == {"over": "global"}
    argument = {"some-patch": {"over": "sequence"}}
    assert of(environment=environment, known=OTHERS, options=argument).options == argument


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"some-pach": {}}, UnknownPatchError, r"unknown patch in options=: 'some-pach'; did you mean 'some-patch'\?"),
        ({"some-patch": {"ovr": "global"}}, SettingError, r"has no option 'ovr'; did you mean 'over'\?"),
        ({"some-patch": {"zzz": "global"}}, SettingError, "has no option 'zzz'; it has over"),
        ({"third-patch": {"over": "global"}}, SettingError, "third-patch has no option 'over'; it has none"),
        ({"some-patch": {"over": "globl"}}, SettingError, "is 'globl', expected one of sequence, global; did you mean"),
        ({"some-patch": {"over": 3}}, SettingError, "is 3, expected one of sequence, global"),
    ],
)
def test_an_unknown_option_or_choice_is_refused_with_what_there_is(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        of(known=OTHERS, options=options)


@pytest.mark.parametrize("value", ["some-patch", "some-patch.over", "some-patch=global"])
def test_options_in_the_environment_have_one_form(value: str) -> None:
    with pytest.raises(SettingError, match=r"TRL_HOTFIX_OPTIONS: expected id\.option=choice, found"):
        of(environment={"TRL_HOTFIX_OPTIONS": value}, known=OTHERS)


def test_every_combination_of_choices_is_listed_with_the_defaults_first() -> None:
    two_options = replace(
        PATCH, options={"over": Option(OVER.choices, "global"), "tail": Option(OVER.choices, "sequence")}
    )
    combinations = two_options.every_choice()
    assert combinations[0] == {"over": "global", "tail": "sequence"}
    assert len(combinations) == 4
    assert all(combinations.count(choices) == 1 for choices in combinations)
    assert PATCH.every_choice() == [{}]


# decide


def test_what_is_selected_and_fits_is_pending() -> None:
    decision = gates.decide(PATCH, Selection(only=frozenset({"some-patch"})), having(trl="0.11.4"))
    assert decision.state is State.PENDING


def test_what_is_not_selected_is_disabled() -> None:
    decision = gates.decide(PATCH, Selection(only=frozenset({"third-patch"})), having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.NOT_SELECTED)


def test_what_is_excluded_is_disabled_even_when_it_is_selected() -> None:
    selection = Selection(only=frozenset({"some-patch"}), skip=frozenset({"some-patch"}))
    decision = gates.decide(PATCH, selection, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.EXCLUDED)


def test_a_patch_that_is_off_by_default_stays_off() -> None:
    decision = gates.decide(patch(default=False), EVERYTHING, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.DEFAULT_OFF)


def test_a_patch_that_is_off_by_default_goes_on_when_it_is_named() -> None:
    named = Selection(only=frozenset({"some-patch"}))
    assert gates.decide(patch(default=False), named, having(trl="0.11.4")).state is State.PENDING


def test_a_selection_does_not_put_a_patch_on_a_release_that_it_is_not_for() -> None:
    named = Selection(only=frozenset({"some-patch"}))
    assert gates.decide(PATCH, named, having(trl="0.12.0")).state is State.RETIRED


def test_what_is_not_selected_is_not_looked_for() -> None:
    def version_of(distribution: str) -> str:
        raise AssertionError(f"asked for {distribution}")

    assert gates.decide(PATCH, Selection(skip=frozenset({"some-patch"})), version_of).reason is Reason.EXCLUDED


ids = st.lists(st.sampled_from(IDS), unique=True)


@given(st.data(), st.none() | ids, ids, some_release, st.booleans())
def test_a_decision_does_not_depend_on_the_order_of_ids(
    data: st.DataObject, only: list[str] | None, skip: list[str], version: str, default: bool
) -> None:
    other_only = None if only is None else data.draw(st.permutations(only))
    other_skip = data.draw(st.permutations(skip))
    chosen = patch(default=default)
    assert gates.decide(chosen, of(only, skip), having(trl=version)) == gates.decide(
        chosen, of(other_only, other_skip), having(trl=version)
    )


@given(st.none() | ids, ids, some_release)
def test_the_environment_decides_as_the_arguments_do(only: list[str] | None, skip: list[str], version: str) -> None:
    environment = {"TRL_HOTFIX_SKIP": ",".join(skip), **({"TRL_HOTFIX_ONLY": ",".join(only)} if only else {})}
    assert gates.decide(PATCH, of(environment=environment), having(trl=version)) == gates.decide(
        PATCH, of(only or None, skip), having(trl=version)
    )
