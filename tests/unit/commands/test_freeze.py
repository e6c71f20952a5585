"""``trl-hotfix freeze``: a file with the patches of this environment."""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading, on_record
from trl_hotfix.commands import freeze_elsewhere
from trl_hotfix.commands.freeze_elsewhere import left_out, report_elsewhere
from trl_hotfix.matching import fingerprints, gates, versions
from trl_hotfix.matching.fingerprints import Bodies
from trl_hotfix.model import Reason, State
from trl_hotfix.selection.selection import Selection

from helpers.command_line import CHECKOUT, ID, run, without_trl


def test_a_freeze_file_reproduces_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    process = run("freeze", "-o", str(file), TRL_HOTFIX_SKIP="dpo-eval-reference-from-trained-policy")
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    frozen, listed = json.loads(file.read_text()), json.loads(run("list", "--json").stdout)
    assert frozen["digest"] != listed["digest"]
    reapplied = json.loads(run("list", "--json", TRL_HOTFIX_ONLY=f"@{file}").stdout)
    assert reapplied["digest"] == frozen["digest"]
    pending = [patch["id"] for patch in reapplied["patches"] if patch["state"] == "pending"]
    assert sorted(pending) == sorted(patch["id"] for patch in frozen["patches"])
    assert ID in pending
    assert [path.name for path in tmp_path.iterdir()] == ["set.json"]


def test_freeze_prints_what_it_would_write(tmp_path: Path) -> None:
    process = run("freeze")
    run("freeze", "-o", str(tmp_path / "set.json"))
    assert (tmp_path / "set.json").read_text() == process.stdout
    assert json.loads(process.stdout)["trl"] == "0.11.4"


def test_freeze_overwrites_only_with_force(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    file.write_text("mine")
    process = run("freeze", "-o", str(file))
    assert (process.returncode, file.read_text()) == (2, "mine")
    assert "--force overwrites it" in process.stderr
    assert run("freeze", "--force", "-o", str(file)).returncode == 0
    assert json.loads(file.read_text())["digest"]


@pytest.mark.parametrize("path", ["no/such/folder/set.json", "."])
def test_a_file_that_cannot_be_written_is_one_error(tmp_path: Path, path: str) -> None:
    process = run("freeze", "--force", "-o", str(tmp_path / path))
    assert process.returncode == 2
    assert "cannot be written" in process.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trl_hotfix.commands import freeze

    def full(self: Path, *args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        freeze._write(tmp_path / "set.json", "text", force=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", [None, "0.7.4"])
def test_freeze_without_a_supported_trl_writes_no_file(tmp_path: Path, version: str | None) -> None:
    path = os.pathsep.join([without_trl(tmp_path, version), str(CHECKOUT)])
    process = run("freeze", "-o", str(tmp_path / "set.json"), PYTHONPATH=path)
    assert (process.returncode, process.stdout) == (4, "")
    assert not (tmp_path / "set.json").exists()


def frozen_ids(*arguments: str, **variables: str) -> list[str]:
    process = run("freeze", *arguments, **variables)
    assert process.returncode == 0, process.stderr
    return [patch["id"] for patch in json.loads(process.stdout)["patches"]]


def test_a_freeze_file_of_another_release_has_its_digest_there(tmp_path: Path) -> None:
    file = tmp_path / "set.json"
    assert run("freeze", "--trl", "0.16.1", "-o", str(file)).returncode == 0
    frozen = json.loads(file.read_text())
    assert frozen["trl"] == "0.16.1"
    there = json.loads(run("list", "--json", "--trl", "0.16.1", TRL_HOTFIX_ONLY=f"@{file}").stdout)
    assert there["digest"] == frozen["digest"]
    pending = [patch["id"] for patch in there["patches"] if patch["state"] == "pending"]
    assert sorted(pending) == sorted(patch["id"] for patch in frozen["patches"])
    assert ID not in pending


@pytest.mark.needs_trl
def test_the_other_versions_are_those_here_unless_they_are_told() -> None:
    patch_id = "sft-loss-normaliser-counts-first-token"
    here = run("freeze", "--trl", "0.16.1")
    assert patch_id not in here.stdout
    assert f"left out: {patch_id}: it needs transformers>=4.46.0,<5.10.1, and found is 4.44.2" in here.stderr
    assert "transformers: 4.44.2 is installed here, and freeze takes it; --with transformers==VERSION" in here.stderr
    told = run("freeze", "--trl", "0.16.1", "--with", "transformers==4.50.3")
    assert patch_id in told.stdout
    assert "transformers: " not in told.stderr


def test_the_version_of_transformers_decides_what_is_inherited() -> None:
    inheriting = "transformers-divides-gradients-of-others-twice"
    told = [f"transformers=={version}" for version in ("5.2.0", "5.5.2", "5.5.4")]
    assert [inheriting in frozen_ids("--trl", "0.28.0", "--with", each) for each in told] == [True, True, False]


def test_selection_and_options_are_followed() -> None:
    patch_id = "sft-padding-free-contamination"
    assert patch_id in frozen_ids("--trl", "0.16.1")
    assert patch_id not in frozen_ids("--trl", "0.16.1", TRL_HOTFIX_SKIP=patch_id)
    assert frozen_ids("--trl", "0.16.1", TRL_HOTFIX_ONLY=patch_id) == [patch_id]
    process = run("freeze", "--trl", "0.16.1", TRL_HOTFIX_ONLY=patch_id)
    assert "left out" not in process.stderr


def test_a_patch_that_is_not_proven_on_a_release_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    patches = loading.load()
    selection = Selection.of(None, None, {}, patches)
    version_of = versions.installed_but("0.16.1")
    on = {status.id for status in report_elsewhere(patches, selection, version_of, None).on()}
    assert on == {
        patch.id
        for patch in patches
        if patch.default
        and gates.applicability(patch, version_of).state is State.PENDING
        and "0.16.1" in on_record.proven_on(patch)
    }
    known = fingerprints.bodies_for
    forgotten = sorted(on)[0]
    monkeypatch.setattr(
        freeze_elsewhere, "bodies_for", lambda patch_id: Bodies((), {}) if patch_id == forgotten else known(patch_id)
    )
    report = report_elsewhere(patches, selection, version_of, None)
    assert {status.id for status in report.on()} == on - {forgotten}
    assert report[forgotten].reason is Reason.UNKNOWN_BODY
    assert any(line.startswith(f"left out: {forgotten}: it is not proven") for line in left_out(report, "0.16.1"))


@pytest.fixture
def fork(tmp_path: Path) -> Path:
    """The installed TRL as the folder of a fork."""
    folder = tmp_path / "fork"
    (folder / "trl-0.11.4+ours.dist-info").mkdir(parents=True)
    shutil.copytree(Path(str(metadata.distribution("trl").locate_file("trl"))), folder / "trl")
    return folder


def test_the_files_decide_for_a_fork(fork: Path) -> None:
    assert frozen_ids("--wheel", str(fork)) == frozen_ids("--trl", "0.11.4")
    module = fork / "trl" / "trainer" / "dpo_trainer.py"
    text = module.read_text()
    assert text.count("def get_batch_loss_metrics(") == 1
    module.write_text(text.replace("def get_batch_loss_metrics(", "def another_name("))
    process = run("freeze", "--wheel", str(fork))
    target = "trl.trainer.dpo_trainer:DPOTrainer.get_batch_loss_metrics"
    assert f"left out: {ID}: there is no {target}" in process.stderr
    assert f'"{ID}"' not in process.stdout
    (body,) = re.findall(r"\n    def another_name\(.*?\n    def ", module.read_text(), re.DOTALL)[:1]
    changed = body.replace("another_name", "get_batch_loss_metrics").replace("metrics = {}", "metrics = dict()")
    module.write_text(text.replace(body.replace("another_name", "get_batch_loss_metrics"), changed))
    assert f"left out: {ID}: it is not proven on the code of {target}" in run("freeze", "--wheel", str(fork)).stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--trl", "99.0"), "TRL 99.0 is not a release on record: give its files, --wheel FILE"),
        (("--trl", "0.16.7"), "there is no TRL 0.16.7"),
        (("--wheel", "gone.whl"), "--wheel: gone.whl is not a wheel of TRL"),
        (("--with", "transformers==4.50.3"), "--with: for another release"),
        (("--trl", "0.16.1", "--with", "trl==0.16.2"), "give the release of TRL as --trl"),
    ],
)
def test_what_cannot_be_frozen_is_one_clear_error(arguments: tuple[str, ...], expected: str) -> None:
    process = run("freeze", *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert expected in process.stderr


def test_a_wheel_of_another_release_is_one_clear_error(fork: Path) -> None:
    process = run("freeze", "--trl", "0.16.1", "--wheel", str(fork))
    assert process.returncode == 2
    assert "--wheel has TRL 0.11.4+ours, and --trl says 0.16.1" in process.stderr


def test_an_old_release_has_nothing_to_freeze() -> None:
    process = run("freeze", "--trl", "0.8.6")
    assert (process.returncode, process.stdout) == (4, "")
