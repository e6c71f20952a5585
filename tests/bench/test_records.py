"""Real trainers of real releases, and what each run leaves on record: in its files, its model card and its trackers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from rich.console import Console

import layout
from bench import HERE, Bench

TRACKERS = ("wandb", "mlflow", "tensorboard")
# With every kind of create_model_card and of training loop. Trackio is known to the newest transformers only.
RUNS = {
    layout.Place("0.9.6", "tf4.44"): (),
    layout.Place("0.11.4", "tf4.44"): TRACKERS,
    layout.Place("0.23.0", "tf4.57"): (),
    layout.Place("1.16.0", "tf5.23"): (*TRACKERS, "trackio"),
}
WITH_TRACKERS = [place for place, trackers in RUNS.items() if trackers]
TRAINERS = {
    "0.9.6": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "Reward with TrainingArguments"},
    "0.11.4": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "RLOO", "PPO", "OnlineDPO", "GKD"},
    "0.23.0": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "PPO", "OnlineDPO", "GKD"},
    "1.16.0": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "OnlineDPO", "GKD"},
}
Answers = Mapping[layout.Place, dict[str, Any]]


@pytest.fixture(scope="session")
def left(everywhere: None) -> Answers:
    bench = Bench(1, True, Console(quiet=True))

    def run(place: layout.Place, trackers: tuple[str, ...]) -> Any:
        overlays = ("trackers", *({"trackio"} & {*trackers})) if trackers else ()
        return bench.process(place, [str(HERE / "records.py"), "{out}", *trackers], 600, *overlays)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(RUNS, pool.map(run, RUNS, RUNS.values()), strict=True))
    for answer in answers.values():
        assert not isinstance(answer, str), answer
    return answers


def said_of(found: Mapping[str, Any], what: str) -> int:
    return sum(line.startswith(f"INFO: {what} with TRL ") for line in found["said"])


def warnings(found: Mapping[str, Any]) -> list[str]:
    return [line for line in found["said"] if line.startswith("WARNING") and "record" in line]


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_every_trainer_has_its_repairs_on_record(left: Answers, place: layout.Place) -> None:
    assert left[place].keys() & set().union(*TRAINERS.values()) == TRAINERS[place.release]
    for name in TRAINERS[place.release]:
        found = left[place][name]
        assert not isinstance(found, str), (name, found)
        (record,) = found["history"]
        assert record["trl"] == place.release, name
        assert record["patches"], name
        assert said_of(found, "training") == 1, (name, found["said"])
        assert warnings(found) == [], name
        assert found["checkpoints"], name
        beside = {f"{each}/trl_hotfix.json" for each in found["checkpoints"]}
        assert found["files"].keys() == {"trl_hotfix.json", *beside}, name
        assert all(each == record for each in found["files"].values()), name
        # Written twice; with a list of what is on.
        assert found["sections"] == 1, name


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_a_trainer_of_others_has_no_record(left: Answers, place: layout.Place) -> None:
    found = left[place]["others"]
    assert found["callbacks"] == 1
    assert found["checkpoints"] == ["checkpoint-1"]
    assert (found["history"], found["files"], found["said"], found["sections"]) == ([], {}, [], 0)


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_every_run_has_one_entry_however_often_a_trainer_runs(left: Answers, place: layout.Place) -> None:
    evaluated, trained, again, other = left[place]["several times"]["found"]
    assert [len(each["history"]) for each in (evaluated, trained, again, other)] == [1, 1, 1, 1]
    # Each has what was said before, too.
    assert [said_of(each, "evaluating") for each in (evaluated, trained, again)] == [1, 1, 1]
    assert [said_of(each, "training") for each in (evaluated, trained, again)] == [0, 1, 2]
    assert (said_of(other, "evaluating"), said_of(other, "training")) == (0, 1)


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_strict_by_hand_is_strict_beside_a_callback_that_is_not(left: Answers, place: layout.Place) -> None:
    found = left[place]["strict by hand"]
    assert found["callbacks"] == 2
    assert "rank 1: something else is on there" in (found["error"] or "")
    assert found["step"] == 0
    assert said_of(found, "training") == 1


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
@pytest.mark.parametrize("how", ["tracked, env", "tracked, hand", "tracked evaluation"])
def test_every_active_tracker_has_the_record_in_its_own_files(left: Answers, place: layout.Place, how: str) -> None:
    found = left[place][how]
    assert not isinstance(found, str), found
    (record,) = found["history"]
    assert warnings(found) == []
    expected = {tracker: [record] for tracker in RUNS[place]}
    if how == "tracked evaluation" and "trackio" in expected:
        # It sends its config with the first metrics, and begins its run when there are some.
        expected["trackio"] = [None]
    assert found["trackers"] == expected


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_the_second_run_of_a_trainer_is_recorded_too(left: Answers, place: layout.Place) -> None:
    found = left[place]["tracked twice"]
    assert not isinstance(found, str), found
    (record,) = found["history"]
    assert warnings(found) == []
    for tracker, runs in found["trackers"].items():
        # One run of wandb lasts until the program ends; mlflow begins another.
        assert runs, tracker
        assert runs == [record] * len(runs), tracker
    assert len(found["trackers"]["mlflow"]) == 2


@pytest.mark.parametrize("place", [each for each in WITH_TRACKERS if "PPO" in TRAINERS[each.release]], ids=str)
@pytest.mark.parametrize("how", ["tracked PPO", "tracked PPO, hand"])
def test_a_training_loop_of_its_own_is_tracked_too(left: Answers, place: layout.Place, how: str) -> None:
    found = left[place][how]
    assert not isinstance(found, str), found
    (record,) = found["history"]
    assert found["trackers"] == {tracker: [record] for tracker in RUNS[place]}


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_a_tracker_that_fails_is_a_warning_and_the_rest_of_the_record_is_there(
    left: Answers, place: layout.Place
) -> None:
    found = left[place]["trackers that fail"]
    assert not isinstance(found, str), found
    (record,) = found["history"]
    said = sorted(warnings(found))
    assert len(said) == len(RUNS[place])
    assert all("does not answer" in each for each in said)
    assert found["files"] == {"trl_hotfix.json": record, "checkpoint-1/trl_hotfix.json": record}


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_a_run_without_trackers_starts_none(left: Answers, place: layout.Place) -> None:
    found = left[place]["without trackers"]
    assert len(found["history"]) == 1
    assert (found["imported"], found["left"]) == ([], ["models", "out"])
