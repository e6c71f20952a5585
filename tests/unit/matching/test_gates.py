"""Whether a patch is for this release, and whether it is selected."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates, versions
from trl_hotfix.model import Patch, Reason, State, Upstream
from trl_hotfix.selection.selection import Selection

from helpers.patch_examples import PATCH, RELEASES, TARGET, having, ids, patch, selection_of, some_release

# The shipped patches


@pytest.mark.parametrize("shipped", loading.load(), ids=lambda release: release.id)
def test_every_shipped_patch_applies_to_a_release(shipped: Patch) -> None:
    without_requirements = replace(shipped, requires={})
    assert any(
        gates.applicability(without_requirements, having(trl=release)).state is State.PENDING for release in RELEASES
    )


@pytest.mark.parametrize("shipped", loading.load(), ids=lambda release: release.id)
def test_no_shipped_patch_applies_to_a_fixed_release(shipped: Patch) -> None:
    fixed_in = shipped.upstream.fixed_in
    fixed = [release for release in RELEASES if fixed_in is not None and Version(release) >= Version(fixed_in)]
    assert [
        release for release in fixed if gates.targets_for(shipped, release) and versions.in_range(release, shipped.trl)
    ] == []


# applicability


def test_an_applicable_patch_is_pending_with_evidence() -> None:
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


def test_a_pre_release_of_the_fix_does_not_retire_the_patch() -> None:
    assert gates.applicability(PATCH, having(trl="0.12.0rc1")).state is State.SKIPPED


@pytest.mark.parametrize("version", ["0.10.1+ours", "0.12.0.dev0", "0.12.0+ours", "1.17.0.dev0"])
def test_an_unreleased_version_is_decided_by_its_bodies(version: str) -> None:
    decision = gates.applicability(PATCH, having(trl=version))
    assert (decision.state, decision.reason) == (State.PENDING, Reason.BODY_DECIDES)


def test_a_later_release_without_a_fixed_version_is_skipped() -> None:
    decision = gates.applicability(patch(upstream=Upstream()), having(trl="1.0.0"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.TRL_VERSION)


def test_a_met_requirement_leaves_the_patch_pending() -> None:
    wanting = patch(requires={"deepspeed": ">=0.14.5", "torch": "<3"})
    assert (
        gates.applicability(wanting, having(trl="0.11.4", deepspeed="0.15.0", torch="2.6.0+cpu")).state is State.PENDING
    )


def test_an_absent_requirement_skips_the_patch() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.REQUIREMENT)
    assert decision.evidence["requires"] == "deepspeed>=0.14.5"
    assert decision.evidence["found"] is None


def test_a_requirement_of_another_version_skips_the_patch() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.11.4", deepspeed="0.14.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.REQUIREMENT)
    assert decision.evidence["found"] == "0.14.4"


def test_the_release_is_checked_before_the_requirements() -> None:
    decision = gates.applicability(patch(requires={"deepspeed": ">=0.14.5"}), having(trl="0.12.0"))
    assert decision.state is State.RETIRED


def test_no_version_is_read_without_a_need() -> None:
    asked = []

    def version_of(distribution: str) -> str:
        asked.append(distribution)
        return "0.11.4"

    gates.applicability(PATCH, version_of)
    assert asked == ["trl"]


# targets_for


def test_a_target_has_the_range_of_its_patch() -> None:
    assert gates.targets_for(PATCH, "0.11.0") == (TARGET,)
    assert gates.targets_for(PATCH, "0.12.0") == ()


def test_a_target_narrows_the_range_of_its_patch() -> None:
    old = replace(TARGET, module="trl.trainer.old", trl=">=0.11.0,<0.11.2")
    new = replace(TARGET, module="trl.trainer.new", trl=">=0.11.2,<0.12.0")
    moved = patch(targets=(old, new, TARGET))
    assert gates.targets_for(moved, "0.11.1") == (old, TARGET)
    assert gates.targets_for(moved, "0.11.2") == (new, TARGET)


def test_a_patch_without_a_target_here_is_skipped() -> None:
    narrow = patch(targets=(replace(TARGET, trl="<0.11.2"),))
    decision = gates.applicability(narrow, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.SKIPPED, Reason.TRL_VERSION)


def test_a_target_does_not_widen_the_range_of_its_patch() -> None:
    wide = patch(upstream=Upstream(), targets=(replace(TARGET, trl=">=0.9.6"),))
    assert gates.applicability(wide, having(trl="1.0.0")).state is State.SKIPPED


EVERYTHING = Selection()


@st.composite
def ranges(draw: st.DrawFn) -> str:
    operators = st.sampled_from([">=", ">", "<", "<=", "==", "!=", "~="])
    parts = draw(st.lists(st.tuples(operators, some_release), max_size=3))
    return ",".join(f"{operator}{version}" for operator, version in parts)


# decide


@settings(suppress_health_check=[HealthCheck.too_slow])  # The first draw makes the strategies.
@given(some_release, ranges())
def test_a_patch_is_pending_exactly_when_in_range(version: str, specifiers: str) -> None:
    decision = gates.decide(patch(trl=specifiers), EVERYTHING, having(trl=version))
    assert (decision.state is State.PENDING) == SpecifierSet(specifiers).contains(version)


def test_a_selected_applicable_patch_is_pending() -> None:
    decision = gates.decide(PATCH, Selection(only=frozenset({"some-patch"})), having(trl="0.11.4"))
    assert decision.state is State.PENDING


def test_an_unselected_patch_is_disabled() -> None:
    decision = gates.decide(PATCH, Selection(only=frozenset({"third-patch"})), having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.NOT_SELECTED)


def test_an_excluded_patch_is_disabled_even_if_selected() -> None:
    selection = Selection(only=frozenset({"some-patch"}), skip=frozenset({"some-patch"}))
    decision = gates.decide(PATCH, selection, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.EXCLUDED)


def test_a_patch_that_is_off_by_default_stays_off() -> None:
    decision = gates.decide(patch(default=False), EVERYTHING, having(trl="0.11.4"))
    assert (decision.state, decision.reason) == (State.DISABLED, Reason.DEFAULT_OFF)


def test_a_patch_off_by_default_is_pending_when_named() -> None:
    named = Selection(only=frozenset({"some-patch"}))
    assert gates.decide(patch(default=False), named, having(trl="0.11.4")).state is State.PENDING


def test_a_patch_off_by_default_is_pending_when_an_option_of_it_is_chosen() -> None:
    chosen = Selection(options={"some-patch": {"kind": "global"}})
    assert gates.decide(patch(default=False), chosen, having(trl="0.11.4")).state is State.PENDING
    another = Selection(options={"third-patch": {"kind": "global"}})
    assert gates.decide(patch(default=False), another, having(trl="0.11.4")).reason is Reason.DEFAULT_OFF


def test_a_selected_patch_is_still_retired_by_its_fix() -> None:
    named = Selection(only=frozenset({"some-patch"}))
    assert gates.decide(PATCH, named, having(trl="0.12.0")).state is State.RETIRED


def test_an_unselected_patch_reads_no_version() -> None:
    def version_of(distribution: str) -> str:
        raise AssertionError(f"asked for {distribution}")

    assert gates.decide(PATCH, Selection(skip=frozenset({"some-patch"})), version_of).reason is Reason.EXCLUDED


@given(st.data(), st.none() | ids, ids, some_release, st.booleans())
def test_a_decision_does_not_depend_on_the_order_of_ids(
    data: st.DataObject, only: list[str] | None, skip: list[str], version: str, default: bool
) -> None:
    other_only = None if only is None else data.draw(st.permutations(only))
    other_skip = data.draw(st.permutations(skip))
    chosen = patch(default=default)
    assert gates.decide(chosen, selection_of(only, skip), having(trl=version)) == gates.decide(
        chosen, selection_of(other_only, other_skip), having(trl=version)
    )


@given(st.none() | ids, ids, some_release)
def test_the_environment_decides_as_the_arguments_do(only: list[str] | None, skip: list[str], version: str) -> None:
    environment = {"TRL_HOTFIX_SKIP": ",".join(skip), **({"TRL_HOTFIX_ONLY": ",".join(only)} if only else {})}
    assert gates.decide(PATCH, selection_of(environment=environment), having(trl=version)) == gates.decide(
        PATCH, selection_of(only or None, skip), having(trl=version)
    )
