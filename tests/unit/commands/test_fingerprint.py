"""``trl-hotfix fingerprint``: the targets of every patch in a release that is not installed."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

from trl_hotfix.catalogue import loading

from helpers.command_line import ID, run

INSTALLED = str(metadata.distribution("trl").locate_file(""))


def test_the_installed_release_matches_its_own_record() -> None:
    answer = json.loads(run("fingerprint", "--wheel", INSTALLED, "--json").stdout)
    assert answer["trl"] == "0.11.4"
    assert len(answer["targets"]) == sum(len(patch.targets) for patch in loading.load())
    (target,) = (
        row for row in answer["targets"] if row["patch"] == ID and row["target"].startswith("trl.trainer.dpo_trainer:")
    )
    assert (target["in_range"], target["says"]) == (True, "matches")


def test_what_is_inherited_is_no_unknown_body() -> None:
    answer = json.loads(run("fingerprint", "--wheel", INSTALLED, "--json").stdout)
    says = {row["target"]: row["says"] for row in answer["targets"]}
    assert says["trl.trainer.dpo_trainer:DPOTrainer.training_step"] == "inherited"


def test_an_unknown_body_in_range_is_exit_1(tmp_path: Path) -> None:
    (tmp_path / "trl-0.11.4.dist-info").mkdir()
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("")
    process = run("fingerprint", "--wheel", str(tmp_path), "--json")
    assert process.returncode == 1, process.stderr
    assert {row["says"] for row in json.loads(process.stdout)["targets"]} == {"gone"}


def test_a_folder_without_trl_is_an_error(tmp_path: Path) -> None:
    process = run("fingerprint", "--wheel", str(tmp_path))
    assert process.returncode != 0
    assert "is not a wheel of TRL" in process.stderr
