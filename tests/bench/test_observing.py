"""``TRL_HOTFIX=observe`` changes no number of a run, and names the bugs that the run hits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

RELEASES = ("0.11.4", "0.23.0", "1.9.0")
TRAINERS = ("DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "PPO", "OnlineDPO", "GKD")
MISSING = {"0.11.4": {"GRPO"}, "1.9.0": {"PPO"}}
TRAINED = [
    (layout.main_place(release), name)
    for release in RELEASES
    for name in TRAINERS
    if name not in MISSING.get(release, ())
]
HITS = [
    (layout.main_place("0.23.0"), "GRPO steps_per_generation=4", "grpo-dapo-normaliser"),
    (layout.main_place("1.9.0"), "GRPO steps_per_generation=4", "grpo-dapo-normaliser"),
    (layout.main_place("0.23.0"), "DPO padding_free=True loss_type='ipo'", "dpo-padding-free-wrong-terms"),
    (layout.main_place("0.23.0"), "SFT padding_free=True", "sft-padding-free-contamination"),
]
SMOKE = [place_and_case for place_and_case in TRAINED if place_and_case[1] in ("DPO", "SFT")][:2]
SECONDS_A_CASE = 180
Runs = Mapping[tuple[layout.Place, str], Any]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> Runs:
    """Return the answers to the cases of each place, by mode."""
    cases = sharing.by_place((case["place"], case["case"]) for case in sharing.parameters(request))
    layout.build(cases)

    def run(key: tuple[layout.Place, str]) -> Any:
        place, mode = key
        # A bug that is hit is compared with the same trainer without it.
        names = dict.fromkeys([*cases[place], *(case.partition(" ")[0] for case in cases[place])])
        if mode == "repair":
            names = dict.fromkeys(case for case in cases[place] if " " in case)
        command = ["-m", "bench.inside.observing", "{out}", mode, *names]
        return process(place, command, 120 + SECONDS_A_CASE * len(names))

    keys = [(place, mode) for place in cases for mode in ("unpatched", "observe")]
    keys += [(place, "repair") for place in cases if any(" " in case for case in cases[place])]
    return sharing.side_by_side(run, keys)


def answer(runs: Runs, place: layout.Place, mode: str, case: str) -> dict[str, Any]:
    answers = runs[place, mode]
    assert not isinstance(answers, str), answers
    answer = answers[case]
    assert isinstance(answer, dict), answer
    return answer


MAPPED_BY_AN_IMPORTED_FUNCTION = {("0.23.0", name) for name in ("DPO", "ORPO", "CPO", "Reward")}
"""These map their dataset with maybe_apply_chat_template, which apply-chat-template-loses-chosen-tokens observes.

Their modules import it by name. What stands there is pickled under that name, and not under that of TRL's own module.
"""


@pytest.mark.parametrize(("place", "case"), sharing.heavy(TRAINED, smoke=SMOKE), ids=str)
def test_an_observed_run_is_that_of_an_unpatched_process_bit_by_bit(runs: Runs, place: layout.Place, case: str) -> None:
    unpatched, observed = (answer(runs, place, mode, case) for mode in ("unpatched", "observe"))
    for part in ("history", "parameters", "random"):
        assert observed[part] == unpatched[part], part
    assert observed["history"]
    is_same = observed["fingerprints"] == unpatched["fingerprints"]
    assert is_same is ((place.release, case) not in MAPPED_BY_AN_IMPORTED_FUNCTION)


@pytest.mark.parametrize(("place", "case"), sharing.heavy(TRAINED, smoke=SMOKE), ids=str)
def test_a_run_without_special_arguments_is_told_of_the_bugs_of_every_run_alone(
    runs: Runs, place: layout.Place, case: str
) -> None:
    hit = {name for name, said in answer(runs, place, "observe", case)["observed"].items() if said == "hit"}
    assert hit == set(EVERY_RUN.get((place.release, case), ()))


ONLINE = ("online-dpo-gradient-not-divided-by-gas", "online-dpo-metrics-include-padding")
EVERY_RUN: Mapping[tuple[str, str], tuple[str, ...]] = {
    ("0.23.0", "SFT"): ("sft-loss-normaliser-counts-first-token",),
    ("0.23.0", "OnlineDPO"): ONLINE,
    ("0.23.0", "GKD"): ("gkd-grad-accum-scaling",),
    ("1.9.0", "SFT"): ("sft-loss-normaliser-counts-first-token",),
    ("1.9.0", "OnlineDPO"): ONLINE,
    ("1.9.0", "GKD"): ("gkd-onpolicy-normaliser-from-dataset-labels",),
}
"""The bugs that each run of these trainers has. None of its arguments but gradient_accumulation_steps=2 is special."""


@pytest.mark.parametrize(("place", "case", "patch"), sharing.heavy(HITS), ids=str)
def test_a_run_is_told_of_the_bug_that_it_hits(runs: Runs, place: layout.Place, case: str, patch: str) -> None:
    observed = answer(runs, place, "observe", case)
    assert observed["observed"][patch] in ("hit", "cannot tell")
    assert observed["called"][patch] > 0
    trainer = case.partition(" ")[0]
    assert answer(runs, place, "observe", trainer)["observed"][patch] == "not hit"
    assert observed["parameters"] == answer(runs, place, "unpatched", case)["parameters"]
    # A run that is repaired is told the same.
    assert answer(runs, place, "repair", case)["hits"][patch] == observed["observed"][patch]
