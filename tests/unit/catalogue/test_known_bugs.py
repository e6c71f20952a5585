"""``known.yaml``: an entry has what a bug has and nothing of a repair, and every mistake has its line."""

from __future__ import annotations

import pytest

from trl_hotfix.catalogue import parsing
from trl_hotfix.errors import CatalogueError
from trl_hotfix.model import Hit, Severity, Upstream

from helpers.example_entry import ENTRY, EXAMPLE
from helpers.example_entry import the_mistake as the_mistake_of_patches

KNOWN = """\
- id: some-bug
  title: A title
  severity: wrong-loss
  trl: ">=0.11.0,<0.12.0"
  upstream: {issue: 1, fixed_in: "0.12.0"}
  why: because
  requires: {transformers: ">=4.48.1,<4.53.0"}
  hits:
    - {trainers: [DPO], when: {beta: ">1"}, symptom: it is wrong}
"""


def mistakes(text: str) -> list[tuple[int, str]]:
    with pytest.raises(CatalogueError) as caught:
        parsing.parse_known(text, "known.yaml", {EXAMPLE.id})
    return [(mistake.line, mistake.message) for mistake in caught.value.mistakes]


def test_an_entry_has_what_it_declares() -> None:
    (bug,) = parsing.parse_known(KNOWN, "known.yaml", ())
    assert (bug.id, bug.title, bug.severity) == ("some-bug", "A title", Severity.WRONG_LOSS)
    assert (bug.trl, bug.upstream) == (">=0.11.0,<0.12.0", Upstream(issue=1, fixed_in="0.12.0"))
    assert bug.hits == (Hit(trainers=("DPO",), when={"beta": ">1"}, symptom="it is wrong"),)
    assert bug.requires == {"transformers": ">=4.48.1,<4.53.0"}


def test_an_entry_with_a_repair_is_one_error_that_names_what_it_has() -> None:
    (mistake,) = mistakes(ENTRY)
    assert mistake == (
        2,
        "an entry here has no repair, and this one has revision, how, targets, self_test: it belongs in patches.yaml",
    )
    wrapper = "  targets: [{module: trl.trainer.dpo_trainer, attribute: DPOTrainer.dpo_loss, wrapper: repair}]\n"
    assert mistakes(KNOWN + wrapper) == [
        (10, "an entry here has no repair, and this one has targets: it belongs in patches.yaml")
    ]


def test_a_known_bug_among_the_patches_is_one_error_that_says_where_it_belongs() -> None:
    line, message = the_mistake_of_patches(ENTRY + KNOWN + "  state: known\n")
    assert line == len((ENTRY + KNOWN).splitlines()) + 1
    assert message == "state: an entry here is a patch; a known bug without a repair is an entry of known.yaml"


PEP_440 = "is not a PEP 440 range such as '>=0.11.0,<0.12.0'"
TAKEN = f"id {EXAMPLE.id!r} belongs to a patch in patches.yaml: delete the entry here"
NOBODY = "trainers is empty: expected names such as [DPO, KTO], or ['*'] for any"


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("some-bug", "Some_bug", 1, "id 'Some_bug' is not lower-case words joined by '-'"),
        ("some-bug", EXAMPLE.id, 1, TAKEN),
        ('trl: ">=0.11.0,<0.12.0"', "trl: new", 4, f"trl: 'new' {PEP_440}"),
        ('fixed_in: "0.12.0"', "fixed_in: soon", 5, "fixed_in: 'soon' is not a version"),
        ('">=4.48.1,<4.53.0"', "x", 7, f"requires transformers: 'x' {PEP_440}"),
        ("  why: because\n", "", 1, "the known bug lacks 'why'"),
        ("  why:", "  whi:", 6, "unknown key 'whi' in a known bug; did you mean 'why'?"),
        ("trainers: [DPO]", "trainers: []", 9, NOBODY),
    ],
)
def test_each_mistake_has_its_line(old: str, new: str, line: int, message: str) -> None:
    assert (line, message) in mistakes(KNOWN.replace(old, new))


def test_an_entry_that_nobody_hits_is_an_error() -> None:
    head = KNOWN.partition("  hits:")[0]
    assert mistakes(f"{head}  hits: []\n") == [
        (8, "hits is empty: an entry without a repair is there to tell who is hit")
    ]
    assert mistakes(head) == [(1, "the known bug lacks 'hits'")]


def test_an_open_range_needs_a_day_of_review() -> None:
    open_ended = KNOWN.replace('">=0.11.0,<0.12.0"', '">=0.11.0"')
    ((line, message),) = mistakes(open_ended)
    assert line == 4
    assert "has no end and the patch no review_by" in message
    (bug,) = parsing.parse_known(open_ended + "  review_by: 2027-05-21\n", "known.yaml", ())
    assert str(bug.review_by) == "2027-05-21"


def test_two_entries_with_one_id_are_an_error() -> None:
    assert mistakes(KNOWN + KNOWN) == [(10, "duplicate id 'some-bug', first used on line 1")]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ("it, facts: {experts: true}}", "facts without depends: it says in words what the facts say"),
        ("it, depends: d, facts: {expert: true}}", "facts: 'expert' is no fact; did you mean 'experts'?; of experts, "),
        ("it, depends: d, facts: {processes: '>x'}}", "facts: processes: '>x' compares with nothing"),
    ],
)
def test_facts_are_checked(new: str, message: str) -> None:
    ((line, found),) = mistakes(KNOWN.replace("it is wrong}", new))
    assert line == 9
    assert found.startswith(message)
