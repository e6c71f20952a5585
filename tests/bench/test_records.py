"""The record that a run of a real trainer leaves: in its files, its model card and its trackers."""

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
# Every kind of create_model_card and of training loop. Only the newest transformers knows Trackio.
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
def answers(everywhere: None) -> Answers:
    bench = Bench(1, True, Console(quiet=True))

    def run(place: layout.Place, trackers: tuple[str, ...]) -> Any:
        overlays = ("trackers", *({"trackio"} & {*trackers})) if trackers else ()
        return bench.process(place, [str(HERE / "records.py"), "{out}", *trackers], 600, *overlays)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        answers = dict(zip(RUNS, pool.map(run, RUNS, RUNS.values()), strict=True))
    for answer in answers.values():
        assert not isinstance(answer, str), answer
    return answers


def announcements(answer: Mapping[str, Any], activity: str) -> int:
    return sum(line.startswith(f"INFO: {activity} with TRL ") for line in answer["said"])


def warnings(answer: Mapping[str, Any]) -> list[str]:
    return [line for line in answer["said"] if line.startswith("WARNING") and "record" in line]


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_every_trainer_records_its_patches(answers: Answers, place: layout.Place) -> None:
    assert answers[place].keys() & set().union(*TRAINERS.values()) == TRAINERS[place.release]
    for name in TRAINERS[place.release]:
        answer = answers[place][name]
        assert not isinstance(answer, str), (name, answer)
        (record,) = answer["history"]
        assert record["trl"] == place.release, name
        assert record["patches"], name
        assert announcements(answer, "training") == 1, (name, answer["said"])
        assert warnings(answer) == [], name
        assert answer["checkpoints"], name
        beside = {f"{checkpoint}/trl_hotfix.json" for checkpoint in answer["checkpoints"]}
        assert answer["files"].keys() == {"trl_hotfix.json", *beside}, name
        assert all(saved == record for saved in answer["files"].values()), name
        # The model card was written twice, and has one section with the list of patches.
        assert answer["sections"] == 1, name


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_a_trainer_of_transformers_has_no_record(answers: Answers, place: layout.Place) -> None:
    answer = answers[place]["others"]
    assert answer["callbacks"] == 1
    assert answer["checkpoints"] == ["checkpoint-1"]
    assert (answer["history"], answer["files"], answer["said"], answer["sections"]) == ([], {}, [], 0)


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_every_run_has_one_entry(answers: Answers, place: layout.Place) -> None:
    evaluated, trained, trained_again, second_trainer = answers[place]["several times"]["found"]
    assert [len(answer["history"]) for answer in (evaluated, trained, trained_again, second_trainer)] == [1, 1, 1, 1]
    # Each answer has the earlier messages too.
    assert [announcements(answer, "evaluating") for answer in (evaluated, trained, trained_again)] == [1, 1, 1]
    assert [announcements(answer, "training") for answer in (evaluated, trained, trained_again)] == [0, 1, 2]
    assert (announcements(second_trainer, "evaluating"), announcements(second_trainer, "training")) == (0, 1)


@pytest.mark.parametrize("place", RUNS, ids=str)
def test_a_strict_callback_by_hand_stays_strict(answers: Answers, place: layout.Place) -> None:
    answer = answers[place]["strict by hand"]
    assert answer["callbacks"] == 2
    assert "rank 1: something else is on there" in (answer["error"] or "")
    assert answer["step"] == 0
    assert announcements(answer, "training") == 1


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
@pytest.mark.parametrize("case", ["tracked, env", "tracked, hand", "tracked evaluation"])
def test_every_active_tracker_has_the_record(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert warnings(answer) == []
    expected = {tracker: [record] for tracker in RUNS[place]}
    if case == "tracked evaluation" and "trackio" in expected:
        # Trackio sends its config with the first metrics, and begins its run when there are some.
        expected["trackio"] = [None]
    assert answer["trackers"] == expected


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_the_second_run_of_a_trainer_is_recorded_too(answers: Answers, place: layout.Place) -> None:
    answer = answers[place]["tracked twice"]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert warnings(answer) == []
    for tracker, runs in answer["trackers"].items():
        # One run of wandb lasts until the program ends; mlflow begins a second run.
        assert runs, tracker
        assert runs == [record] * len(runs), tracker
    assert len(answer["trackers"]["mlflow"]) == 2


@pytest.mark.parametrize("place", [place for place in WITH_TRACKERS if "PPO" in TRAINERS[place.release]], ids=str)
@pytest.mark.parametrize("case", ["tracked PPO", "tracked PPO, hand"])
def test_a_training_loop_of_its_own_is_tracked_too(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert answer["trackers"] == {tracker: [record] for tracker in RUNS[place]}


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_a_tracker_that_fails_is_only_a_warning(answers: Answers, place: layout.Place) -> None:
    answer = answers[place]["trackers that fail"]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    messages = sorted(warnings(answer))
    assert len(messages) == len(RUNS[place])
    assert all("does not answer" in message for message in messages)
    assert answer["files"] == {"trl_hotfix.json": record, "checkpoint-1/trl_hotfix.json": record}


@pytest.mark.parametrize("place", WITH_TRACKERS, ids=str)
def test_a_run_without_trackers_starts_none(answers: Answers, place: layout.Place) -> None:
    answer = answers[place]["without trackers"]
    assert len(answer["history"]) == 1
    assert (answer["imported"], answer["left"]) == ([], ["models", "out"])
