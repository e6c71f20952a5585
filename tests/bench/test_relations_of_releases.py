"""What a release has answered is an answer of each release with the same code, and is not asked again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from rich.console import Console

from trl_hotfix.relations import by_hand, forms, odd_models
from trl_hotfix.relations.changes import CHANGES, changed
from trl_hotfix.relations.claims import OfFormula, Pair
from trl_hotfix.relations.ledger import Finding
from trl_hotfix.relations.relations import RELATIONS
from trl_hotfix.relations.setting import Setting
from trl_hotfix.relations.trainers import RECIPES

from bench.proving import running
from bench.relations import asking, known
from bench.relations.ledger import not_seen, without_cause
from bench.releases import layout, trl_code
from bench.results import keys
from bench.shards import Shard

OLDER, NEWEST = (layout.main_place(release) for release in ("1.15.0", layout.releases()[-1]))
ANSWER = {"cell": {"state": "holds"}, "seconds": 1.0}


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout.build([OLDER, NEWEST])
    monkeypatch.setattr(known, "BENCH", tmp_path)


def function(*, equal: bool) -> str:
    """Return a function of SFT's module that is equal in both releases, or differs."""
    older, newest = (trl_code._pieces(place.release) for place in (OLDER, NEWEST))
    return next(
        name
        for name in older
        if name.startswith("trl.trainer.sft_trainer:SFTTrainer.") and (older[name] == newest.get(name)) is equal
    )


@pytest.mark.parametrize("equal", [True, False])
def test_an_answer_is_known_where_the_called_code_is_equal(*, equal: bool) -> None:
    known.keep("key", OLDER, {**ANSWER, "calls": [function(equal=equal)]}, on=False)
    assert (known.find("key", NEWEST, on=False) is not None) is equal


def test_an_answer_is_asked_again_when_a_patch_of_its_module_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    called = {**ANSWER, "calls": [function(equal=True)]}
    known.keep("key", NEWEST, called, on=True)
    known.keep("other", NEWEST, called, on=False)
    monkeypatch.setattr(keys, "cell_key", lambda patch, place: "changed")
    known._patches_on.cache_clear()
    assert known.find("key", NEWEST, on=True) is None
    assert known.find("other", NEWEST, on=False) is not None
    known._patches_on.cache_clear()


def test_the_claim_the_recipe_and_the_patches_are_in_the_key() -> None:
    plain = Setting()
    usual = (RECIPES["SFT"], "padding", Pair(plain, plain.but(width=16)), NEWEST)
    others: list[tuple[Any, ...]] = [
        (RECIPES["DPO"], *usual[1:]),
        (usual[0], "order", *usual[2:]),
        (*usual[:2], Pair(plain, plain.but(width=8)), usual[3]),
    ]
    found = {known.key(*each, on=on) for each in [usual, *others] for on in (True, False)}
    assert len(found | {known.key(*usual, on=True, overlays=["liger"])}) == 9


def test_a_formula_and_a_form_are_in_the_key_of_their_claims_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Setting()
    claims = (
        OfFormula(plain.but(by_hand="KTO")),
        Pair(plain, plain.but(form="conversation with label")),
        Pair(plain, plain.but(form="extra column")),
    )

    def all_keys() -> list[str]:
        return [known.key(RECIPES["KTO"], "formats", claim, NEWEST, on=True) for claim in claims]

    before = all_keys()
    monkeypatch.setitem(by_hand.FORMULAS, "KTO", by_hand.FORMULAS["ORPO"])
    assert [one == other for one, other in zip(before, all_keys(), strict=True)] == [False, True, True]
    monkeypatch.setitem(forms.FORMS, "conversation with label", forms.FORMS["conversation of three"])
    assert [one == other for one, other in zip(before, all_keys(), strict=True)] == [False, False, True]


def test_a_change_and_an_odd_model_are_in_the_key_of_their_claims_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Setting()
    claims = (
        Pair(plain, changed(plain, "a trained adapter")),
        Pair(plain, plain.but(architecture="balanced")),
        Pair(plain, plain.but(architecture="experts")),
    )

    def all_keys() -> list[str]:
        return [known.key(RECIPES["SFT"], "adapters", claim, NEWEST, on=True) for claim in claims]

    before = all_keys()
    monkeypatch.setitem(CHANGES, "a trained adapter", CHANGES["a trained IA3"])
    assert [one == other for one, other in zip(before, all_keys(), strict=True)] == [False, True, True]
    monkeypatch.setitem(odd_models.MODELS, "balanced", ("Mixtral", {"router_aux_loss_coef": 0.1}))
    assert [one == other for one, other in zip(before, all_keys(), strict=True)] == [False, False, True]


SEEING = [one for one in asking.claims_of("SFT", ["formats", "models"]) if "images" in str(one[1])]


def test_claims_that_need_other_packages_are_asked_apart() -> None:
    works = asking.works_of(NEWEST, "GRPO", asking.claims_of("GRPO", ["ranks", "options"]), on=True)
    by_need = {work.overlays: {str(claim) for _, claim in work.claims} for work in works}
    assert by_need.keys() == {(), ("deepspeed",), ("liger",)}
    assert all("engine=zero" in claim for claim in by_need["deepspeed",])
    assert all("liger" in claim for claim in by_need["liger",])
    (work,) = asking.works_of(NEWEST, "SFT", [one for one in SEEING if one[0] == "formats"], on=True)
    assert work.overlays == ("images",)
    early = asking.works_of(layout.main_place("0.16.1"), "GRPO", asking.claims_of("GRPO", ["ranks"]), on=True)
    assert {work.overlays for work in early} == {(), ("deepspeed-0.15.4",)}


def test_each_relation_of_a_trainer_is_asked_in_one_shard() -> None:
    asked = [
        relation for number in range(1, 5) for relation in asking.chosen(Shard(number, 4), NEWEST, "SFT", RELATIONS)
    ]
    assert sorted(asked) == sorted(RELATIONS)


def test_the_record_alone_is_asked_of_whom_it_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[asking.Work] = []
    monkeypatch.setattr(asking.record, "subjects", lambda: {(str(NEWEST), True, "SFT"), (str(OLDER), False, "DPO")})
    monkeypatch.setattr(asking, "ask", lambda works, jobs, console: asked.extend(works) or [])
    arguments = ["--recorded", "--releases", f"{OLDER.release},{NEWEST.release}", "--into", str(tmp_path / "answers")]
    assert CliRunner().invoke(asking.command, arguments).exit_code == 0
    assert {(str(work.place), work.on, work.trainer) for work in asked} == asking.record.subjects()


def test_the_record_says_who_is_on_it() -> None:
    assert (str(NEWEST), True, "GRPO") in asking.record.subjects()


def test_what_is_known_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    work = asking.Work(NEWEST, "SFT", True, asking.claims_of("SFT", ["effects"]))
    first = asking.ask([work], 1, Console(quiet=True))
    assert [answer["cell"]["state"] for answer in first] == ["holds"] * len(work.claims)
    monkeypatch.setattr(asking, "_run", lambda work: pytest.fail("it is known"))
    assert asking.ask([work], 1, Console(quiet=True)) == first


def test_what_a_killed_process_has_answered_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    work = asking.Work(NEWEST, "SFT", True, asking.claims_of("SFT", ["padding"])[:2])
    relation, claim = work.claims[0]
    cell = {"trainer": "SFT", "relation": relation, "setting": str(claim), "state": "holds"}
    answered = [{"cell": cell, "calls": [], "seconds": 1.0}]
    monkeypatch.setattr(running, "lines_of", lambda *args: (answered, "the process ended with exit code -2"))
    asking._run(work)
    assert [work.known(each) is not None for each in work.claims] == [True, False]


def test_a_claim_without_an_answer_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "answer_of", lambda *args, **kwargs: "no answer within 1 s")
    work = asking.Work(NEWEST, "SFT", True, asking.claims_of("SFT", ["effects"])[:1])
    (answer,) = asking.ask([work], 1, Console(quiet=True))
    assert (answer["cell"]["state"], answer["cell"]["why"]) == ("error", "no answer within 1 s")


FINDING = Finding("padding", ("SFT",), ("loss",), "It is so.", trl=">=1.0", new="a-bug")


def violated(*what: str, on: bool = True, place: object = NEWEST) -> dict[str, Any]:
    differences = [{"what": each, "left": 1.0, "right": 2.0, "apart": 0.5} for each in what]
    state = "violated" if what else "holds"
    cell = {"trainer": "SFT", "relation": "padding", "setting": "a = b", "state": state, "differences": differences}
    return {"place": str(place), "on": on, "cell": cell}


def test_a_violation_without_a_cause_is_given_with_its_numbers() -> None:
    answers = [violated("loss of step 1", "kl of step 2")]
    assert [str(each) for each in without_cause(answers, [FINDING])] == [
        f"{NEWEST} on SFT padding: a = b: kl of step 2: 1 and 2"
    ]


def test_a_patch_is_no_cause_where_it_is_on() -> None:
    repaired = msgspec.structs.replace(FINDING, new=None, patch="a-patch")
    answers = [violated("loss of step 1", on=on) for on in (True, False)]
    assert [each.on for each in without_cause(answers, [repaired])] == [True]


def test_a_finding_that_nothing_shows_is_given() -> None:
    elsewhere = msgspec.structs.replace(FINDING, trl="<1.0")
    assert list(not_seen([violated("kl of step 1")], [FINDING, elsewhere])) == [(f"{NEWEST} on", FINDING)]
    assert list(not_seen([violated("loss of step 1")], [FINDING])) == []
