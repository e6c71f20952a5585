"""The patches of a run are on record, and are the same on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from trl_hotfix.catalogue import loading

from launched import LAUNCHED, TESTS

if TYPE_CHECKING:
    import subprocess

    from launched.environments import Environment

SCRIPT = str(LAUNCHED / "train_tiny.py")
# transformers 4.44 loads the states of the random generators in a way that torch 2.6 forbids by default.
QUIET = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
ON = ["moe-aux-loss-lost-under-deepspeed", "dpo-eval-reference-from-trained-policy"]
"""The two oldest patches that are on in a DPO run with TRL 0.11.4."""
OF_LOG = ["eval-mean-of-batch-means", "eval-dict-metrics-collide"]
"""Those that wrap ``DPOTrainer.log``."""


def train(
    installed: Environment, folder: Path, *words: str, ranks: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    return installed.run(
        *launcher, SCRIPT, str(out), str(folder), *words, cwd=None, PYTHONPATH=str(TESTS), **QUIET, **variables
    )


def recorded(folder: Path) -> list[Any]:
    history = json.loads((folder / "out.json").read_text())
    return [entry["trl_hotfix"] for entry in history if "trl_hotfix" in entry]


def revision(patch_id: str) -> str:
    return next(f"r{patch.revision}" for patch in loading.load() if patch.id == patch_id)


def calls(record: Any) -> dict[str, int]:
    return {entry["id"]: entry["called"] for entry in record["patches"]}


def test_a_run_records_its_patches_everywhere(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, TRL_HOTFIX="1", TRL_HOTFIX_LOG="full")
    assert process.returncode == 0, process.stderr
    (record,) = recorded(tmp_path)
    assert set(ON) <= {entry["id"] for entry in record["patches"]}
    assert f"training with TRL 0.11.4, digest {record['digest']}: " in process.stderr
    saved = [
        json.loads((tmp_path / "out" / folder / "trl_hotfix.json").read_text())
        for folder in ("checkpoint-1", "checkpoint-2", "")
    ]
    assert saved[2] == record
    # transformers logs once more after the last checkpoint, and the wrappers of log count that.
    later = {patch_id: count - calls(saved[1])[patch_id] for patch_id, count in calls(record).items()}
    assert {patch_id: more for patch_id, more in later.items() if more} == dict.fromkeys(OF_LOG, 1)
    assert {**saved[1], "patches": []} == {**record, "patches": []}
    # The first checkpoint has the counts of its time.
    assert calls(saved[0]).keys() == calls(record).keys()
    assert all(calls(saved[0])[patch_id] <= count for patch_id, count in calls(record).items())
    assert 0 < calls(saved[0])[ON[0]] < calls(record)[ON[0]]
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert sum("trl_hotfix" in entry for entry in state["log_history"]) == 1

    frozen = f"@{tmp_path / 'out' / 'checkpoint-1' / 'trl_hotfix.json'}"
    second = train(installed, tmp_path, TRL_HOTFIX="1", TRL_HOTFIX_ONLY=frozen)
    assert second.returncode == 0, second.stderr
    # What is said of the patches that the file leaves out is of the selection, and not of the repairs.
    about_others = ("hits", "problems")
    repairs = [
        {name: value for name, value in one.items() if name not in about_others}
        for one in (*recorded(tmp_path), record)
    ]
    assert repairs[0] == repairs[1]

    resumed = train(installed, tmp_path, "resume", TRL_HOTFIX="1")
    assert "goes on from a checkpoint" not in resumed.stderr
    # The counts are those of each process.
    assert [entry["digest"] for entry in recorded(tmp_path)] == [record["digest"]] * 2
    skipping = train(installed, tmp_path, "resume", TRL_HOTFIX="1", TRL_HOTFIX_SKIP=ON[1])
    assert skipping.returncode == 0, skipping.stderr
    assert f"other repairs: {ON[1]} is {revision(ON[1])} in the checkpoint, not on now" in skipping.stderr
    assert [len(entry["patches"]) for entry in recorded(tmp_path)] == [
        len(record["patches"]),
        len(record["patches"]) - 1,
    ]


def test_the_record_is_in_the_first_log_entry(installed: Environment, tmp_path: Path) -> None:
    """Scripts that read ``log_history[0]["loss"]`` still work; TRL's own tests do so."""
    process = train(installed, tmp_path, TRL_HOTFIX="1", SETTINGS='{"logging_steps": 1}')
    assert process.returncode == 0, process.stderr
    history = json.loads((tmp_path / "out.json").read_text())
    assert ["trl_hotfix" in entry for entry in history] == [True, False, False]
    assert ["loss" in entry for entry in history] == [True, True, False]


@pytest.mark.matrix
def test_a_checkpoint_before_the_first_log_has_the_record(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, TRL_HOTFIX="1", SETTINGS='{"logging_steps": 2}')
    assert process.returncode == 0, process.stderr
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert ["trl_hotfix" in entry for entry in state["log_history"]] == [True]
    assert len(recorded(tmp_path)) == 1


@pytest.mark.matrix
def test_a_second_callback_by_hand_adds_no_record(installed: Environment, tmp_path: Path) -> None:
    full: Any = {"TRL_HOTFIX": "1", "TRL_HOTFIX_LOG": "full"}
    by_hand = train(installed, tmp_path, "by-hand", **full, TRL_HOTFIX_CALLBACK="0")
    assert by_hand.returncode == 0, by_hand.stderr
    assert by_hand.stderr.count("training with TRL 0.11.4") == 1
    assert len(recorded(tmp_path)) == 1
    twice = train(installed, tmp_path, "by-hand", **full)
    assert twice.stderr.count("training with TRL 0.11.4") == 1
    assert len(recorded(tmp_path)) == 1


@pytest.mark.matrix
def test_the_callback_can_be_left_out(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, TRL_HOTFIX="1", TRL_HOTFIX_CALLBACK="0")
    assert process.returncode == 0, process.stderr
    assert recorded(tmp_path) == []
    assert not list(tmp_path.rglob("trl_hotfix.json"))
    assert "repairs on for DPO" in process.stderr


@pytest.mark.matrix
def test_ranks_with_the_same_patches_train_silently(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, ranks=2, TRL_HOTFIX="strict-all")
    assert process.returncode == 0, process.stderr
    assert "WARNING" not in "".join(line for line in process.stderr.splitlines() if "trl_hotfix" in line)
    assert process.stderr.count(" INFO: this run: hit ") + process.stderr.count(" INFO: this run hit none ") == 1
    assert len(recorded(tmp_path)) == 1


def test_a_rank_with_other_patches_is_named(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, ranks=2, TRL_HOTFIX="1", ONLY_RANK_1=f"TRL_HOTFIX_SKIP={ON[1]}")
    assert process.returncode == 0, process.stderr
    message = f"rank 1: {ON[1]} is {revision(ON[1])} on rank 0, not on there"
    assert [f"trl_hotfix [rank {rank}]: WARNING: {message}" in process.stderr for rank in (0, 1)] == [True, True]
    (record,) = recorded(tmp_path)
    by_id = {entry["id"]: entry for entry in record["patches"]}
    assert by_id[ON[1]]["ranks"] == {"called": [0], "off": [1]}
    assert "ranks" not in by_id[ON[0]]
    assert by_id[ON[0]]["all_ranks"] == {"called": 2 * by_id[ON[0]]["called"], "acted": 0}


@pytest.mark.parametrize("rank_1", [pytest.param("TRL_HOTFIX=1", marks=pytest.mark.matrix), f"TRL_HOTFIX_SKIP={ON[1]}"])
def test_strict_ranks_that_differ_do_not_train(installed: Environment, tmp_path: Path, rank_1: str) -> None:
    trains = rank_1 == "TRL_HOTFIX=1"
    process = train(installed, tmp_path, ranks=2, TRL_HOTFIX="strict-all", ONLY_RANK_1=rank_1)
    assert (process.returncode == 0) is trains, process.stderr
    assert ("strict mode: training does not begin" in process.stderr) is not trains
    assert (tmp_path / "out" / "checkpoint-1").is_dir() is trains


@pytest.mark.matrix
def test_a_rank_without_trl_hotfix_is_named(installed: Environment, tmp_path: Path) -> None:
    process = train(installed, tmp_path, ranks=2, TRL_HOTFIX="1", TRL_HOTFIX_PATIENCE="2", ONLY_RANK_1="TRL_HOTFIX=0")
    assert process.returncode == 0, process.stderr
    assert "rank 1: no answer within 2 s (TRL_HOTFIX_PATIENCE): no trl_hotfix is on there" in process.stderr
