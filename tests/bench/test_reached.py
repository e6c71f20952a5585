"""`applied` is said of a class, `repaired` of a run: trainers that patches do not reach, and those that they do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from helpers import sharing

KEEP_END, NUM_TOKENS = "dpo-keep-end-zeroes-samples", "num-tokens-reset-on-resume"
SFT, DPO, GRPO = "sft-eos-masked-when-pad-is-eos", "moe-aux-loss-lost-under-deepspeed", "grpo-dapo-normaliser"

# The release; the case; the patch; its state; whether strict mode ends the run, and after how many steps.
TABLE = [
    ("0.11.4", "made before apply", SFT, "unreached (made-before)", 0),
    ("0.11.4", "copied into a project", DPO, "unreached (not-inherited)", 0),
    ("0.11.4", "rebuilt by type", DPO, "unreached (not-inherited)", 0),
    ("0.11.4", "step without a call", DPO, "unreached (not-called)", 1),
    ("0.11.4", "reloaded after an edit", DPO, "conflicted (foreign-wrapper)", None),
    ("0.16.1", "its own code in training", KEEP_END, "unreached (overridden)", 1),
    ("0.24.0", "copied without trls module", "dpo-extra-eos-conversational", "unreached (not-inherited)", 0),
    ("1.16.0", "with an unused class", NUM_TOKENS, "applied (proven)", None),
    ("0.11.4", "made with it", SFT, "applied (proven)", None),
    ("0.11.4", "made with it and reverted", SFT, "reverted (by-request)", None),
    ("0.11.4", "step patch after the trainer", DPO, "applied (proven)", None),
]
KEPT_APART = [
    # The release; the case; the patch; its word in the record of the run.
    ("1.16.0", "made beside one with pairs", "kto-paired-data-in-blocks", "not seen"),
    ("0.19.1", "made with another option", "grpo-loss-type-by-normalisation", "repaired"),
    ("1.9.0", "prompts and completions", "completion-start-prefix-mismatch", "called"),
    ("1.9.0", "subclass of trl", GRPO, "standing by"),
]
RUNS = [(release, name) for release, name, *_ in TABLE]
STRICT = [(release, f"{name}, strict") for release, name, *_, steps in TABLE if steps is not None]
HEALTHY = [
    *(("0.11.4", "made with it, strict"), ("0.11.4", "step patch after the trainer, strict")),
    ("1.16.0", "with an unused class, strict"),
]
TRAINERS = [
    (release, "every trainer") for release in ("0.9.6", "0.11.4", "0.16.1", "0.22.2", "0.28.0", "1.9.0", "1.16.0")
]
RESUMED = [("0.28.0", "resumed"), ("1.16.0", "resumed")]
ITS_OWN_LOSS = [("1.16.0", "resumed with its own loss")]
SMOKE = [
    *(run for run in RUNS if run[1] in ("made before apply", "made with it", "made with it and reverted")),
    ("0.11.4", "copied into a project"),
    ("0.11.4", "made before apply, strict"),
    ("0.11.4", "step without a call, strict"),
    ("0.11.4", "every trainer"),
]
Answers = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> Answers:
    """Return the answers of each release, by case."""
    return sharing.answers_by_release(request, lambda release: ["-m", "bench.inside.reached", "{out}"], 900)


def entry(record: Any, patch: str) -> Any:
    return next((one for one in record["patches"] if one["id"] == patch), None)


@pytest.mark.parametrize(("release", "case"), sharing.heavy(RUNS, smoke=SMOKE))
def test_report_log_and_record_say_what_the_run_was(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    patch, state = next((patch, state) for _, name, patch, state, _ in TABLE if name == case)
    assert answer["states"][patch] == state
    assert answer["raised"] is None
    assert answer["steps"] == 2
    warnings = [
        line for line in answer["said"] if line.startswith("WARNING") and patch in line and "NOT on" not in line
    ]
    assert bool(warnings) == (not state.startswith(("applied", "reverted"))), answer["said"]
    final = answer["files"]["trl_hotfix.json"]
    assert final["schema"] == 2
    if state.startswith("unreached"):
        assert entry(final, patch) is None
        assert [(one["id"], one["reason"]) for one in final["unreached"] if one["id"] == patch] == [
            (patch, state.partition("(")[2].rstrip(")"))
        ]
    assert answer["history"] == [final]


@pytest.mark.parametrize(("release", "case"), sharing.heavy([*STRICT, *HEALTHY], smoke=SMOKE))
def test_strict_ends_a_run_that_is_not_repaired_and_no_other(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    if (release, case) in HEALTHY:
        assert (answer["raised"], answer["steps"]) == (None, 2)
        return
    patch, state, steps = next(
        (patch, state, steps) for _, name, patch, state, steps in TABLE if name == case.removesuffix(", strict")
    )
    assert f"{patch}: {state}" in answer["raised"]
    assert answer["steps"] == steps


@pytest.mark.parametrize(("release", "case"), sharing.heavy([(release, case) for release, case, *_ in KEPT_APART]))
def test_the_word_of_a_patch_is_that_of_its_own_trainer(answers: Answers, release: str, case: str) -> None:
    """Not of another trainer of the process, of a later `apply()`, or of data that the patch leaves as they are."""
    patch, word = next((patch, word) for _, name, patch, word in KEPT_APART if name == case)
    final = sharing.answer_of(answers, release, case)["files"]["trl_hotfix.json"]
    found = entry(final, patch)
    assert found["word"] == word
    if case == "made with another option":
        assert found["options"] == {"normalisation": "sequence"}
    if case == "prompts and completions":
        assert patch not in [hit["id"] for hit in final["hits"]]


@pytest.mark.parametrize(("release", "case"), sharing.heavy(ITS_OWN_LOSS))
def test_a_resumed_run_of_an_own_loss_that_calls_trls_is_repaired(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    about = [line for line in answer["repaired"] if f": {NUM_TOKENS} (bug: " in line]
    assert [line.partition(": ")[2].partition(":")[0] for line in about] == ["repairs", "repaired"]
    assert not [line for line in answer["repaired"] if line.startswith("WARNING")]
    # Under observe, one line for all that differs, and first what this run hits.
    (other,) = [line for line in answer["observed"] if "a checkpoint of other repairs" in line]
    first = other.partition(" other repairs: ")[2].partition(" ")[0]
    assert first in ("sft-loss-normaliser-counts-first-token", NUM_TOKENS)
    assert other.count(";") == 2


@pytest.mark.parametrize(("release", "case"), [("0.11.4", "made with it")])
def test_the_record_grows_with_the_run(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    repaired = entry(answer["files"]["trl_hotfix.json"], SFT)
    assert (repaired["word"], repaired["acted"]) == ("repaired", 1)
    assert entry(answer["files"]["trl_hotfix.json"], DPO)["word"] == "selected"
    for checkpoint in ("checkpoint-1", "checkpoint-2"):
        # Its own file, and the history that it has been saved with.
        assert entry(answer["files"][f"{checkpoint}/trl_hotfix.json"], SFT) == repaired
        assert [entry(record, SFT) for record in answer["checkpoints"][checkpoint]] == [repaired]
    last = [line for line in answer["said"] if line.startswith("INFO") and " acted in " in line]
    assert len(last) == 1
    assert f"repaired: {SFT} (bug: " in last[0]
    assert "); your run: " in last[0]
    assert last[0].endswith("; acted in 1 of 1 calls")


@pytest.mark.parametrize(("release", "case"), [("0.11.4", "made with it and reverted")])
def test_what_a_trainer_was_made_with_stays_on_record_after_revert(answers: Answers, release: str, case: str) -> None:
    final = sharing.answer_of(answers, release, case)["files"]["trl_hotfix.json"]
    assert final["patches"] == []
    assert [(one["id"], one["word"], one["acted"]) for one in final["reverted"]] == [(SFT, "repaired", 1)]


@pytest.mark.parametrize(("release", "case"), sharing.heavy([("0.11.4", "step patch after the trainer")]))
def test_a_count_is_of_the_steps(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    counts = {name: entry(record, DPO)["called"] for name, record in answer["files"].items()}
    assert counts["checkpoint-1/trl_hotfix.json"] < counts["checkpoint-2/trl_hotfix.json"]
    assert counts["checkpoint-2/trl_hotfix.json"] == counts["trl_hotfix.json"]


@pytest.mark.parametrize(("release", "case"), sharing.heavy(TRAINERS, smoke=SMOKE))
def test_no_trainer_of_trl_is_called_unreached(answers: Answers, release: str, case: str) -> None:
    trained = sharing.answer_of(answers, release, case)
    assert trained
    for name, answer in trained.items():
        assert answer["warned"] == [], (name, answer)
        assert answer["steps"] >= 1, (name, answer)


@pytest.mark.parametrize(("release", "case"), sharing.heavy(RESUMED))
def test_resuming_without_a_record_is_said(answers: Answers, release: str, case: str) -> None:
    answer = sharing.answer_of(answers, release, case)
    # An argument of the run is called resume_from_checkpoint.
    about = {name: [line for line in lines if " checkpoint" in line] for name, lines in answer.items()}
    assert about == {
        "without a record": [
            "WARNING: this run goes on from a checkpoint without a record: its steps may not have been repaired"
        ],
        "with one": [],
    }
