"""What ran is on record, and is the same in every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import subprocess

    from conftest import Environment

SCRIPT = str(Path(__file__).with_name("train_tiny.py"))
# transformers 4.44 loads the states of the random generators in a way that torch 2.6 forbids by default.
QUIET = {
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
}
ON = ["moe-aux-loss-lost-under-deepspeed", "dpo-eval-reference-from-trained-policy"]
"""What is on for a DPO run with TRL 0.11.4, of the patches that have been there from the start."""


def train(
    installed: Environment, folder: Path, *words: str, ranks: int = 1, **variables: str
) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    return installed.run(*launcher, SCRIPT, str(out), str(folder), *words, cwd=None, **QUIET, **variables)


def recorded(folder: Path) -> list[Any]:
    history = json.loads((folder / "out.json").read_text())
    return [each["trl_hotfix"] for each in history if "trl_hotfix" in each]


def test_a_run_has_its_repairs_in_the_log_in_its_history_and_beside_every_checkpoint(
    installed: Environment, tmp_path: Path
) -> None:
    done = train(installed, tmp_path, TRL_HOTFIX="1")
    assert done.returncode == 0, done.stderr
    (record,) = recorded(tmp_path)
    assert set(ON) <= {each["id"] for each in record["patches"]}
    assert f"training with TRL 0.11.4, digest {record['digest']}: " in done.stderr
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-1", tmp_path / "out" / "checkpoint-2"):
        assert json.loads((folder / "trl_hotfix.json").read_text()) == record
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert sum("trl_hotfix" in each for each in state["log_history"]) == 1

    frozen = f"@{tmp_path / 'out' / 'checkpoint-1' / 'trl_hotfix.json'}"
    again = train(installed, tmp_path, TRL_HOTFIX="1", TRL_HOTFIX_ONLY=frozen)
    assert again.returncode == 0, again.stderr
    assert recorded(tmp_path) == [record]

    resumed = train(installed, tmp_path, "resume", TRL_HOTFIX="1")
    assert "goes on from a checkpoint" not in resumed.stderr
    assert recorded(tmp_path) == [record]
    other = train(installed, tmp_path, "resume", TRL_HOTFIX="1", TRL_HOTFIX_SKIP=ON[1])
    assert other.returncode == 0, other.stderr
    assert f"other repairs: {ON[1]} is r1 in the checkpoint, not on now" in other.stderr
    assert [len(each["patches"]) for each in recorded(tmp_path)] == [len(record["patches"]), len(record["patches"]) - 1]


def test_the_record_lies_in_the_first_entry_of_the_history_and_is_none_of_its_own(
    installed: Environment, tmp_path: Path
) -> None:
    """A script that reads ``log_history[0]["loss"]`` goes on; those of TRL's own tests do."""
    done = train(installed, tmp_path, TRL_HOTFIX="1", SETTINGS='{"logging_steps": 1}')
    assert done.returncode == 0, done.stderr
    history = json.loads((tmp_path / "out.json").read_text())
    assert ["trl_hotfix" in each for each in history] == [True, False, False]
    assert ["loss" in each for each in history] == [True, True, False]


def test_a_checkpoint_from_before_the_first_entry_has_the_record_too(installed: Environment, tmp_path: Path) -> None:
    done = train(installed, tmp_path, TRL_HOTFIX="1", SETTINGS='{"logging_steps": 2}')
    assert done.returncode == 0, done.stderr
    state = json.loads((tmp_path / "out" / "checkpoint-1" / "trainer_state.json").read_text())
    assert ["trl_hotfix" in each for each in state["log_history"]] == [True]
    assert len(recorded(tmp_path)) == 1


def test_the_callback_by_hand_does_the_same_and_twice_is_once(installed: Environment, tmp_path: Path) -> None:
    by_hand = train(installed, tmp_path, "by-hand", TRL_HOTFIX="1", TRL_HOTFIX_CALLBACK="0")
    assert by_hand.returncode == 0, by_hand.stderr
    assert by_hand.stderr.count("training with TRL 0.11.4") == 1
    assert len(recorded(tmp_path)) == 1
    both = train(installed, tmp_path, "by-hand", TRL_HOTFIX="1")
    assert both.stderr.count("training with TRL 0.11.4") == 1
    assert len(recorded(tmp_path)) == 1


def test_the_callback_can_be_left_out(installed: Environment, tmp_path: Path) -> None:
    done = train(installed, tmp_path, TRL_HOTFIX="1", TRL_HOTFIX_CALLBACK="0")
    assert done.returncode == 0, done.stderr
    assert recorded(tmp_path) == []
    assert not list(tmp_path.rglob("trl_hotfix.json"))
    assert f"applied {ON[0]}" in done.stderr


def test_ranks_with_the_same_repairs_train_without_a_word(installed: Environment, tmp_path: Path) -> None:
    done = train(installed, tmp_path, ranks=2, TRL_HOTFIX="strict")
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in "".join(line for line in done.stderr.splitlines() if "trl_hotfix" in line)
    assert done.stderr.count("training with TRL 0.11.4") == 1
    assert len(recorded(tmp_path)) == 1


def test_a_rank_with_other_patches_is_named_with_the_patch(installed: Environment, tmp_path: Path) -> None:
    done = train(installed, tmp_path, ranks=2, TRL_HOTFIX="1", ONLY_RANK_1=f"TRL_HOTFIX_SKIP={ON[1]}")
    assert done.returncode == 0, done.stderr
    said = f"rank 1: {ON[1]} is r1 on rank 0, not on there"
    assert [f"trl_hotfix [rank {rank}]: WARNING: {said}" in done.stderr for rank in (0, 1)] == [True, True]


@pytest.mark.parametrize("others", ["TRL_HOTFIX=1", f"TRL_HOTFIX_SKIP={ON[1]}"])
def test_under_strict_ranks_that_differ_end_before_the_first_step(
    installed: Environment, tmp_path: Path, others: str
) -> None:
    same = others == "TRL_HOTFIX=1"
    done = train(installed, tmp_path, ranks=2, TRL_HOTFIX="strict", ONLY_RANK_1=others)
    assert (done.returncode == 0) is same, done.stderr
    assert ("strict mode: training does not begin" in done.stderr) is not same
    assert (tmp_path / "out" / "checkpoint-1").is_dir() is same


def test_a_rank_without_trl_hotfix_is_named_and_nobody_hangs(installed: Environment, tmp_path: Path) -> None:
    done = train(installed, tmp_path, ranks=2, TRL_HOTFIX="1", TRL_HOTFIX_PATIENCE="2", ONLY_RANK_1="TRL_HOTFIX=0")
    assert done.returncode == 0, done.stderr
    assert "rank 1: no trl_hotfix is on there" in done.stderr
