"""A new release: what its results mean, and what is edited because of them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from msgspec.structs import replace

from trl_hotfix.catalogue.data_files import manifest
from trl_hotfix.model import Patch, Severity, Target, Upstream

from bench.relations.compared import compared
from bench.releases import layout, new_release, release_report, yaml_edits
from bench.releases.judgement import BodyChange, Judgement, State, body_change, judge
from bench.releases.release_report import Findings, Step

SFT = "trl.trainer.sft_trainer"
DPO = "trl.trainer.dpo_trainer"
PATCH = Patch(
    "made-up",
    1,
    "A made-up bug",
    Severity.WRONG_LOSS,
    ">=1.0.0",
    Upstream(),
    "why",
    "how",
    (Target(SFT, "SFTTrainer.__init__", "repair"), Target(DPO, "DPOTrainer.__init__", "repair", ">=1.1.0")),
    "self_test",
    review_by=date(2027, 5, 21),
)
CHANGED = {target.name: BodyChange.CHANGED for target in PATCH.targets}
EQUAL = {target.name: BodyChange.EQUAL for target in PATCH.targets}
CLOSED = replace(PATCH, trl=">=1.0.0,<1.1.0", targets=PATCH.targets[:1])

CATALOGUE = """\
# The catalogue.

- id: other
  trl: ">=1.0.0"  # not to be edited

- id: made-up
  revision: 1
  title: A made-up bug
  severity: wrong-loss
  trl: ">=1.0.0"  # since the beginning
  review_by: "2027-05-21"
  upstream: {}
  why: why
  how: how
  targets:
    - {module: trl.trainer.sft_trainer, attribute: SFTTrainer.__init__, wrapper: repair}
    - module: trl.trainer.dpo_trainer
      attribute: DPOTrainer.__init__
      wrapper: repair
      trl: ">=1.1.0"
  self_test: self_test
"""


def cell(verdict: str, sft: str = "", dpo: str = "", stack: str = "tf4", why: str = "") -> dict[str, Any]:
    reds = {SFT: sft, DPO: dpo}
    leaves = {module: {"red": {"verdict": red}} for module, red in reds.items() if red}
    return {"patch": PATCH.id, "stack": stack, "verdict": verdict, "why": why, "leaves": leaves}


def proof(verdict: str) -> dict[str, Any]:
    return {"patch": PATCH.id, "stack": "tf4", "verdict": verdict, "why": ""}


OPEN = cell("proven", "reproduced", "reproduced")
FIXED = cell("not-reproduced", "fixed", "fixed")


@pytest.mark.parametrize(
    ("patch", "bodies", "cells", "proofs", "state"),
    [
        (PATCH, EQUAL, [OPEN], [proof("proven")], State.OPEN),
        (PATCH, CHANGED, [OPEN], [proof("proven")], State.OPEN),
        (PATCH, CHANGED, [FIXED, {**FIXED, "stack": "tf5"}], [proof("not-reproduced")], State.FIXED),
        (PATCH, CHANGED, [FIXED, cell("absent", stack="tf5")], [], State.FIXED),
        (PATCH, CHANGED, [cell("not-reproduced", "reproduced", "fixed")], [proof("proven")], State.PARTLY_FIXED),
        (CLOSED, EQUAL, [cell("absent", "fixed")], [proof("absent")], State.ABSENT),
        (CLOSED, CHANGED, [cell("uncovered", "reproduced")], [], State.BACK),
        (CLOSED, CHANGED, [cell("absent", "fixed")], [proof("uncovered")], State.BACK),
    ],
)
def test_the_state_follows_from_self_tests_and_proofs(
    patch: Patch, bodies: Any, cells: Any, proofs: Any, state: State
) -> None:
    judged = judge(patch, "1.3.0", bodies, cells, proofs)
    assert (judged.state, judged.why) == (state, "out of range, but the bug is there" if state is State.BACK else "")
    assert judged.fixed_modules == {State.FIXED: {SFT, DPO}, State.PARTLY_FIXED: {DPO}}.get(state, set())


@pytest.mark.parametrize(
    ("patch", "bodies", "cells", "proofs", "why"),
    [
        (PATCH, CHANGED, [cell("error", why="KeyError: 'loss'")], [], "KeyError: 'loss'"),
        (PATCH, CHANGED, [cell("unrepaired", "reproduced", "reproduced", why="failed")], [], "unrepaired: failed"),
        (CLOSED, CHANGED, [cell("absent", "fixed")], [proof("error")], "proof on tf4: error"),
        (PATCH, {**EQUAL, f"{SFT}:SFTTrainer.__init__": BodyChange.GONE}, [OPEN], [], "SFTTrainer.__init__ is gone"),
        (PATCH, CHANGED, [FIXED, {**OPEN, "stack": "tf5"}], [], "depending on the stack"),
        (PATCH, CHANGED, [cell("not-reproduced", "absent", "fixed")], [], "says absent"),
        (PATCH, EQUAL, [FIXED], [], "no target has changed"),
        (replace(PATCH, trl=">=1.0.0,<1.4.0"), CHANGED, [FIXED], [], "goes on to a later release"),
        (PATCH, CHANGED, [FIXED], [proof("proven")], "training still has the bug"),
        (PATCH, CHANGED, [OPEN], [proof("not-reproduced")], "training does not"),
    ],
)
def test_what_the_bench_cannot_decide_is_for_a_person(
    patch: Patch, bodies: Any, cells: Any, proofs: Any, why: str
) -> None:
    judged = judge(patch, "1.3.0", bodies, cells, proofs)
    assert judged.state is State.UNCLEAR
    assert why in judged.why


@pytest.mark.parametrize(
    ("before", "now", "change"),
    [("a", "a", "equal"), ("a", "b", "changed"), ("a", None, "gone"), (None, "a", "new"), (None, None, "in neither")],
)
def test_a_body_is_compared_with_that_of_the_release_before(before: Any, now: Any, change: str) -> None:
    assert body_change(before, now).value == change


def test_a_fix_ends_the_ranges_and_nothing_else_of_the_catalogue_changes() -> None:
    ended = yaml_edits.ended(PATCH, "1.3.0", frozenset({SFT, DPO}))
    assert yaml_edits.with_policy(CATALOGUE, PATCH, ended) == CATALOGUE.replace(
        'trl: ">=1.0.0"  # since', 'trl: ">=1.0.0,<1.3.0"  # since'
    ).replace('  review_by: "2027-05-21"\n', "").replace("upstream: {}", 'upstream: {fixed_in: "1.3.0"}').replace(
        'trl: ">=1.1.0"', 'trl: ">=1.1.0,<1.3.0"'
    )


def test_fixed_in_comes_behind_the_issue_and_the_pull_request() -> None:
    patch = replace(PATCH, upstream=Upstream(issue=12, fix=(34, 35)))
    text = CATALOGUE.replace("upstream: {}", "upstream: {issue: 12, fix: [34, 35]}")
    ended = yaml_edits.ended(patch, "1.3.0", frozenset({SFT, DPO}))
    assert 'upstream: {issue: 12, fix: [34, 35], fixed_in: "1.3.0"}\n' in yaml_edits.with_policy(text, patch, ended)


def test_a_partial_fix_ends_the_range_of_its_targets_alone() -> None:
    ended = yaml_edits.ended(PATCH, "1.3.0", frozenset({SFT}))
    expected = CATALOGUE.replace("wrapper: repair}", 'wrapper: repair, trl: ">=1.0.0,<1.3.0"}')
    assert yaml_edits.with_policy(CATALOGUE, PATCH, ended) == expected
    ended = yaml_edits.ended(PATCH, "1.3.0", frozenset({DPO}))
    expected = CATALOGUE.replace('trl: ">=1.1.0"', 'trl: ">=1.1.0,<1.3.0"')
    assert yaml_edits.with_policy(CATALOGUE, PATCH, ended) == expected


def test_a_target_that_is_fixed_alone_gets_a_range_on_a_line_of_its_own() -> None:
    patch = replace(PATCH, targets=(PATCH.targets[0], replace(PATCH.targets[1], trl=None)))
    text = CATALOGUE.replace('      trl: ">=1.1.0"\n', "")
    ended = yaml_edits.ended(patch, "1.3.0", frozenset({DPO}))
    expected = CATALOGUE.replace('trl: ">=1.1.0"', 'trl: ">=1.0.0,<1.3.0"')
    assert yaml_edits.with_policy(text, patch, ended) == expected


def test_an_edit_that_would_say_something_else_is_refused() -> None:
    ended = yaml_edits.ended(PATCH, "1.3.0", frozenset({SFT, DPO}))
    with pytest.raises(ValueError, match="edit it by hand"):
        yaml_edits.with_policy(CATALOGUE.replace("title: A made-up bug", "title: Another"), PATCH, ended)


def test_every_entry_of_the_catalogue_can_be_edited() -> None:
    text = manifest().read_text(encoding="utf-8")
    patches = [patch for patch in new_release.loading.load() if yaml_edits.is_open(patch.trl)]
    assert patches
    for patch in patches:
        modules = frozenset(target.module for target in patch.targets)
        ended = yaml_edits.ended(patch, "99.0", modules)
        assert (ended.upstream.fixed_in, ended.review_by, yaml_edits.is_open(ended.trl)) == ("99.0", None, False)
        text = yaml_edits.with_policy(text, patch, ended)


@pytest.mark.parametrize(
    ("specifiers", "ended"), [(">=1.0", ">=1.0,<1.3"), (">=1.0,!=1.1,!=1.2", ">=1.0,<1.3,!=1.1,!=1.2")]
)
def test_an_end_comes_before_the_holes(specifiers: str, ended: str) -> None:
    assert yaml_edits.is_open(specifiers)
    assert yaml_edits.with_end(specifiers, "1.3") == ended
    assert not yaml_edits.is_open(ended)


def test_a_release_is_added_behind_the_one_before_on_each_of_its_stacks() -> None:
    text = 'stacks:  # all\n  a:\n    ["1.0", "1.1"]\n  b: ["1.0"]\nspecial: {"1.1": {x: 1}}\nsecond:\n  c: ["1.1"]\n'
    expected = text.replace('"1.1"]', '"1.1", "1.2"]')
    assert yaml_edits.with_release(text, "1.1", "1.2") == expected


def test_a_full_line_of_releases_is_continued_below() -> None:
    versions = [f"1.{minor}.0" for minor in range(10, 21)]
    text = f"stacks:\n  a:\n    {versions}\n".replace("'", '"')
    edited = yaml_edits.with_release(text, versions[-1], "1.21.0")
    assert yaml.safe_load(edited)["stacks"]["a"] == [*versions, "1.21.0"]
    assert edited.splitlines()[-1] == '     "1.21.0"]'
    assert max(map(len, edited.splitlines())) <= yaml_edits.WIDTH


@pytest.fixture
def rereading() -> Iterator[None]:
    """Let a test replace releases.yaml."""
    new_release.forget(layout)
    yield
    new_release.forget(layout)


def test_a_new_release_is_on_the_stacks_of_the_newest(rereading: None, monkeypatch: pytest.MonkeyPatch) -> None:
    text = new_release.RELEASES.read_text(encoding="utf-8")
    newest = layout.releases()[-1]
    stacks = [place.stack for place in layout.places([newest])]
    edited = yaml_edits.with_release(text, newest, "99.0")
    monkeypatch.setattr(layout, "settings", lambda: yaml.safe_load(edited))
    layout._stacks_by_release.cache_clear()
    assert layout.releases()[-1] == "99.0"
    assert [place.stack for place in layout.places(["99.0"])] == stacks
    assert text.count("#") == edited.count("#")


def test_a_release_that_nothing_lists_before_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected a list with '1\.1', found none"):
        yaml_edits.with_release('stacks: {a: ["1.0"]}', "1.1", "1.2")


METADATA = """\
Metadata-Version: 2.4
Name: trl
Requires-Dist: accelerate>=1.10
Requires-Dist: transformers>=5.9
Requires-Dist: huggingface_hub>=0.34
Requires-Dist: triton>=3
Requires-Dist: numpy; python_version < "3"
Requires-Dist: liger-kernel>=0.8; extra == "liger"
"""


def test_the_requirements_that_a_stack_does_not_meet_are_named() -> None:
    stack = {"accelerate": "1.12.0", "transformers": "4.57.6", "huggingface-hub": "0.36.0"}
    assert new_release.unmet_requirements(METADATA, stack.get) == [
        "it requires transformers>=5.9; the stack has 4.57.6",
        "it requires triton>=3; the stack has none",
    ]


def test_what_is_no_new_release_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(new_release.evidence, "load", lambda patch_id: {"releases": [layout.releases()[-1]]})
    with pytest.raises(click.ClickException, match="expected one such as"):
        new_release.checked("newest")
    with pytest.raises(click.ClickException, match="is known"):
        new_release.checked(layout.releases()[-1])
    with pytest.raises(click.ClickException, match="older than every release"):
        new_release.checked("0.1.0")
    assert new_release.checked("99.0") == layout.releases()[-1]


class Sources:
    """The sources of a release."""

    def __init__(self, version: str, text: str) -> None:
        self.version, self._text = version, text

    def text(self, module: str, attribute: str) -> str:
        return self._text


def test_the_report_has_states_diffs_edits_times_and_what_a_person_has_to_do() -> None:
    judgements = [
        Judgement(PATCH, State.OPEN, CHANGED),
        Judgement(replace(PATCH, id="closed"), State.ABSENT, CHANGED),
        Judgement(replace(PATCH, id="strange"), State.UNCLEAR, EQUAL, "the self-test says absent"),
    ]
    findings = Findings("1.3.0", "1.2.0", ["tf4"], judgements, {PATCH.id: "self-test proven (tf4)"})
    findings.edits, findings.steps = "+new\n", [Step("wheel", "", 2.0), Step("proofs", "1 proven", 3.4)]
    text = release_report.markdown(findings, Sources("1.2.0", "old = 1"), Sources("1.3.0", "new = 1"))  # type: ignore[arg-type]
    assert "3 patches: 1 unclear, 1 open, 1 absent." in text
    assert "- `strange`: unclear: the self-test says absent\n" in text
    assert "| `made-up` | open | `trainer.sft_trainer:SFTTrainer.__init__` changed<br>" in text
    assert "Changed body, same verdict: `closed`." in text
    assert "-old = 1\n+new = 1\n" in text
    assert "```diff\n+new\n```" in text
    assert "| all | | 5 |" in text


def test_a_violation_without_a_cause_is_in_the_report_and_for_a_person() -> None:
    difference = {"what": "loss of step 1", "left": 1.0, "right": 2.0, "apart": 0.5}
    cell = {
        "trainer": "SFT",
        "relation": "padding",
        "setting": "a = b",
        "state": "violated",
        "differences": [difference],
    }
    before, place = (layout.main_place(version) for version in ("1.15.0", "1.16.0"))
    answer = {"place": str(place), "on": True, "cell": cell, "seconds": 1.0, "ran": str(place)}
    findings = Findings("1.16.0", "1.15.0", ["tf4"], [], {}, relations=compared([answer], before, place, []))
    assert findings.for_a_person == ["relations: padding of SFT is violated, without a cause in the ledger: 1 claim"]
    text = release_report.markdown(findings, Sources("1.15.0", ""), Sources("1.16.0", ""))  # type: ignore[arg-type]
    assert f"- {findings.for_a_person[0]}\n" in text
    assert "| SFT | padding | `a = b` | not there | loss of step 1: 1 and 2 | no cause |\n" in text


def test_a_long_diff_is_cut_and_says_so(tmp_path: Path) -> None:
    before, after = ("\n".join(f"{word} {line}" for line in range(50)) for word in ("old", "new"))
    lines = release_report.diff(before, after, "1.2.0", "1.3.0", limit=10)
    assert (len(lines), lines[-1]) == (11, "... 93 more lines")
