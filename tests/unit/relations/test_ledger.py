"""The ledger: an entry is checked when it is read, and explains what it names and nothing else."""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec
import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.errors import CatalogueError
from trl_hotfix.relations import ledger
from trl_hotfix.relations.cells import ERROR, OF_TRL, ON_RECORD, VIOLATED

ENTRY = """\
- relation: accumulation
  trainers: [SFT]
  differs: [entropy, rewards/]
  setting: accumulation=4
  trl: ">=1.0"
  requires: {transformers: ">=4.50"}
  meant: trl/trainer/sft_trainer.py:1
  why: It logs means of micro-batches.
"""
CELL = {"trainer": "SFT", "relation": "accumulation", "setting": "plain = batch_size=2 accumulation=4"}


def finding() -> ledger.Finding:
    return ledger.parse(ENTRY, "relations.yaml")[0]


def test_every_id_on_record_is_of_the_catalogue() -> None:
    patches = {patch.id for patch in loading.load()}
    known = {bug.id for bug in loading.without_repair()}
    for each in ledger.load():
        assert each.patch is None or each.patch in patches
        assert each.known is None or each.known in known
        # When it gets its entry, the ledger names that.
        assert each.new not in patches | known


@pytest.mark.parametrize("what", ["entropy of step 2", "rewards/chosen of step 1", "evaluation: entropy of step 1"])
def test_it_explains_what_it_names(what: str) -> None:
    assert ledger.cause_of(CELL, what, [finding()]) == finding()
    assert finding().cause == "meant trl/trainer/sft_trainer.py:1"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"trainer": "DPO"}, "entropy of step 2"),
        ({"relation": "padding"}, "entropy of step 2"),
        ({"setting": "plain = batch_size=4 accumulation=2"}, "entropy of step 2"),
        ({}, "loss of step 2"),
        ({}, "gradient of step 1: norm"),
    ],
)
def test_it_explains_nothing_else(change: dict[str, str], what: str) -> None:
    assert ledger.cause_of({**CELL, **change}, what, [finding()]) is None


@pytest.mark.parametrize(
    ("versions", "is_here"),
    [
        ({"trl": "1.16.0", "transformers": "4.57.0"}, True),
        ({"trl": "0.24.0", "transformers": "4.57.0"}, False),
        ({"trl": "1.16.0", "transformers": "4.46.0"}, False),
        ({"trl": "1.16.0"}, False),
    ],
)
def test_it_is_where_its_ranges_are(versions: dict[str, str], *, is_here: bool) -> None:
    assert finding().is_here(versions.get) is is_here


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            "accumulation\n",
            "accumulates\n",
            "line 1: relation: 'accumulates' is not known; did you mean 'accumulation'?",
        ),
        ("[SFT]", "[STF]", "line 2: trainers: 'STF' is not known; did you mean 'SFT'?"),
        ("[SFT]", "[]", "line 2: trainers is empty"),
        ('">=1.0"', '"1.0 or newer"', "line 5: trl: '1.0 or newer' is not a PEP 440 range such as '>=0.11.0,<0.12.0'"),
        ("meant:", "men:", "line 7: unknown key 'men' in a finding"),
        ("  why", "  new: a-bug\n  why", "line 1: expected one cause of patch, known, meant, new; found meant and new"),
        ("  meant: trl/trainer/sft_trainer.py:1\n", "", "found none"),
    ],
)
def test_a_mistake_is_told_with_its_line(before: str, after: str, message: str) -> None:
    with pytest.raises(CatalogueError) as error:
        ledger.parse(textwrap.dedent(ENTRY.replace(before, after, 1)), "relations.yaml")
    assert message in str(error.value)


def judged(
    monkeypatch: pytest.MonkeyPatch, trainer: str = "SFT", state: str = VIOLATED, *what: str, on: bool = True
) -> Any:
    monkeypatch.setattr(ledger, "load", lambda: (finding(),))
    monkeypatch.setattr(ledger, "installed", {"trl": "1.16.0", "transformers": "4.57.0"}.get)
    differences = [{"what": each} for each in what or ("entropy of step 1",)]
    cell = {**CELL, "trainer": trainer, "state": state, "differences": differences}
    answer = ledger.with_causes(cell, "SFT", on=on)
    return answer["state"], [each["cause"] for each in answer["differences"]]


CAUSE = "meant trl/trainer/sft_trainer.py:1"


def test_a_cell_of_trl_names_its_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch) == (ON_RECORD, [CAUSE])
    assert judged(monkeypatch, "SFT", VIOLATED, "entropy of step 1", "loss of step 1") == (VIOLATED, [CAUSE, None])


def test_an_error_has_a_cause_too(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = msgspec.structs.replace(finding(), differs=("IndexError: pop",))
    monkeypatch.setattr(ledger, "load", lambda: (failed,))
    monkeypatch.setattr(ledger, "installed", {"trl": "1.16.0", "transformers": "4.57.0"}.get)
    cell = {**CELL, "state": ERROR, "differences": []}
    answer = ledger.with_causes({**cell, "why": "IndexError: pop from an empty deque"}, "SFT", on=True)
    assert (answer["state"], answer["why"]) == (ON_RECORD, f"IndexError: pop from an empty deque ({CAUSE})")
    other = {**cell, "why": "KeyError: x"}
    assert ledger.with_causes(other, "SFT", on=True) == other


def test_what_the_trainer_of_a_user_violates_is_not_on_record(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, "mine:Trainer") == (VIOLATED, [None])
    assert judged(monkeypatch, "mine:Trainer", OF_TRL) == (OF_TRL, [CAUSE])


def test_a_patch_is_a_cause_where_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    repaired = msgspec.structs.replace(finding(), meant=None, patch="a-patch")
    monkeypatch.setitem(globals(), "finding", lambda: repaired)
    assert judged(monkeypatch, on=False) == (ON_RECORD, ["patch a-patch"])
    assert judged(monkeypatch, on=True) == (VIOLATED, [None])
