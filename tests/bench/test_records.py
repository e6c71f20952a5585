"""The record that a run of a real trainer leaves: in its files, its model card and its trackers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import le
from typing import Any

import pytest

from bench.proving.running import process
from bench.releases import layout
from helpers import sharing

TRACKERS = ("wandb", "mlflow", "tensorboard")
# Every kind of create_model_card and of training loop. Only the newest transformers knows Trackio.
RUNS = {
    layout.Place("0.9.6", "tf4.44"): (),
    layout.Place("0.11.4", "tf4.44"): TRACKERS,
    layout.Place("0.23.0", "tf4.57"): (),
    layout.Place("1.16.0", "tf5.23"): (*TRACKERS, "trackio"),
}
SMOKE = [(layout.Place("0.9.6", "tf4.44"), "DPO")]
WITH_TRACKERS = [place for place, trackers in RUNS.items() if trackers]
TRAINERS = {
    "0.9.6": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "Reward with TrainingArguments"},
    "0.11.4": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "RLOO", "PPO", "OnlineDPO", "GKD"},
    "0.23.0": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "PPO", "OnlineDPO", "GKD"},
    "1.16.0": {"DPO", "SFT", "KTO", "ORPO", "CPO", "Reward", "GRPO", "RLOO", "OnlineDPO", "GKD"},
}
SECONDS_A_CASE = 120
Answers = Mapping[layout.Place, dict[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return the answers of each place, by case."""
    cases = sharing.by_place((case["place"], case["case"]) for case in sharing.parameters(request))
    layout.build(cases)

    def run(place: layout.Place) -> Any:
        overlays = ("trackers", *({"trackio"} & {*RUNS[place]})) if RUNS[place] else ()
        command = ["-m", "bench.inside.records", "{out}", ",".join(RUNS[place]), *cases[place]]
        return process(place, command, 480 + SECONDS_A_CASE * len(cases[place]), *overlays)

    answers = sharing.side_by_side(run, cases)
    for answer in answers.values():
        assert not isinstance(answer, str), answer
    return answers


def in_cases(*cases: str, places: Iterable[layout.Place] = RUNS) -> pytest.MarkDecorator:
    """Return the parameters ``place`` and ``case``: these cases in each place."""
    return pytest.mark.parametrize(
        ("place", "case"), sharing.heavy((place, case) for place in places for case in cases), ids=str
    )


def announcements(answer: Mapping[str, Any], activity: str) -> int:
    return sum(line.startswith(f"DEBUG: {activity} with TRL ") for line in answer["said"])


def newest(trackers: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the newest record in each tracker. TensorBoard keeps each text, and a record grows with its run."""
    return {tracker: records[-1:] for tracker, records in trackers.items()}


def at_the_beginning(answer: Mapping[str, Any], run: int, runs: int) -> Any:
    """Return the record with which a training began. TensorBoard keeps each, and as many of every training."""
    texts = answer["trackers"]["tensorboard"]
    assert len(texts) % runs == 0, len(texts)
    return texts[run * len(texts) // runs]


def without_counts(record: Mapping[str, Any]) -> dict[str, Any]:
    patches = [{**entry, "called": None, "acted": None, "steps": None} for entry in record["patches"]]
    return {**record, "patches": patches}


def counts_of(record: Mapping[str, Any]) -> list[int]:
    return [entry.get(name, 0) for entry in record["patches"] for name in ("called", "acted")]


def warnings(answer: Mapping[str, Any]) -> list[str]:
    return [line for line in answer["said"] if line.startswith("WARNING") and "record" in line]


@in_cases("trainers")
def test_the_trainers_below_are_all_of_the_release(answers: Answers, place: layout.Place, case: str) -> None:
    assert set(answers[place][case]) == TRAINERS[place.release]


@pytest.mark.parametrize(
    ("place", "case"),
    sharing.heavy([(place, name) for place in RUNS for name in sorted(TRAINERS[place.release])], smoke=SMOKE),
    ids=str,
)
def test_every_trainer_records_its_patches(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert record["trl"] == place.release
    assert record["patches"]
    assert announcements(answer, "training") == 1, answer["said"]
    assert warnings(answer) == []
    assert answer["checkpoints"]
    beside = {f"{checkpoint}/trl_hotfix.json" for checkpoint in answer["checkpoints"]}
    files = dict(answer["files"])
    assert files.keys() == {"trl_hotfix.json", *beside}
    assert files.pop("trl_hotfix.json") == record
    for saved in files.values():
        # Methods that the end of the training calls, as ``log``, are counted after the last checkpoint, and so is a
        # step of PPO.
        assert without_counts(saved) == without_counts(record)
        assert all(map(le, counts_of(saved), counts_of(record)))
    # The model card was written twice, and has one section with the patches of this trainer, if there are some.
    own = [entry for entry in record["patches"] if entry["word"] != "selected"]
    assert answer["sections"] == bool(own)


@in_cases("others")
def test_a_trainer_of_transformers_has_no_record(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert answer["callbacks"] == 1
    assert answer["checkpoints"] == ["checkpoint-1"]
    assert (answer["history"], answer["files"], answer["said"], answer["sections"]) == ([], {}, [], 0)


@in_cases("several times")
def test_every_run_has_one_entry(answers: Answers, place: layout.Place, case: str) -> None:
    evaluated, trained, trained_again, second_trainer = answers[place][case]["found"]
    assert [len(answer["history"]) for answer in (evaluated, trained, trained_again, second_trainer)] == [1, 1, 1, 1]
    # Each answer has the earlier messages too.
    assert [announcements(answer, "evaluating") for answer in (evaluated, trained, trained_again)] == [1, 1, 1]
    assert [announcements(answer, "training") for answer in (evaluated, trained, trained_again)] == [0, 1, 2]
    assert (announcements(second_trainer, "evaluating"), announcements(second_trainer, "training")) == (0, 1)


@in_cases("strict by hand")
def test_a_strict_callback_by_hand_stays_strict(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert answer["callbacks"] == 2
    assert "rank 1: something else is on there" in (answer["error"] or "")
    assert answer["step"] == 0
    assert announcements(answer, "training") == 1


@in_cases("tracked, env", "tracked, hand", "tracked evaluation", places=WITH_TRACKERS)
def test_every_active_tracker_has_the_record(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert warnings(answer) == []
    expected: dict[str, Any] = {tracker: [record] for tracker in RUNS[place]}
    if "trackio" in expected:
        # Trackio sends its config with the first metrics and never again, and begins its run when there are some.
        expected["trackio"] = [None if case == "tracked evaluation" else at_the_beginning(answer, 0, 1)]
    assert newest(answer["trackers"]) == expected


@in_cases("tracked twice", places=WITH_TRACKERS)
def test_the_second_run_of_a_trainer_is_recorded_too(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert warnings(answer) == []
    for tracker, runs in answer["trackers"].items():
        # One run of wandb lasts until the program ends; mlflow begins a second run.
        assert runs, tracker
        assert (at_the_beginning(answer, 1, 2) if tracker == "trackio" else record) in runs, tracker
        assert {run["digest"] for run in runs} == {record["digest"]}, tracker
    assert len(answer["trackers"]["mlflow"]) == 2


@in_cases(
    "tracked PPO", "tracked PPO, hand", places=[place for place in WITH_TRACKERS if "PPO" in TRAINERS[place.release]]
)
def test_a_training_loop_of_its_own_is_tracked_too(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    assert newest(answer["trackers"]) == {tracker: [record] for tracker in RUNS[place]}


@in_cases("trackers that fail", places=WITH_TRACKERS)
def test_a_tracker_that_fails_is_only_a_warning(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert not isinstance(answer, str), answer
    (record,) = answer["history"]
    messages = sorted(warnings(answer))
    assert len(messages) == len(RUNS[place])
    assert all("does not answer" in message for message in messages)
    assert answer["files"] == {"trl_hotfix.json": record, "checkpoint-1/trl_hotfix.json": record}


@in_cases("without trackers", places=WITH_TRACKERS)
def test_a_run_without_trackers_starts_none(answers: Answers, place: layout.Place, case: str) -> None:
    answer = answers[place][case]
    assert len(answer["history"]) == 1
    assert (answer["imported"], answer["left"]) == ([], ["models", "out"])
