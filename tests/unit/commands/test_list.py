"""``trl-hotfix list``: what applies to this TRL, or to another one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trl_hotfix.catalogue import loading
from trl_hotfix.model import Severity

from helpers.command_line import ID, run, without_trl


def test_list_shows_what_applies_and_why() -> None:
    process = run("--list")
    assert process.returncode == 0, process.stderr
    assert ID in process.stdout
    assert "applies: TRL 0.11.4 has this bug" in process.stdout


def test_list_all_imports_neither_torch_nor_trl() -> None:
    assert run("list", "--all").stdout == run("--list").stdout
    code = (
        "import sys; from trl_hotfix.commands.main import main\ntry: main(['--list'])\n"
        "finally: print([name for name in ('torch', 'trl', 'wrapt') if name in sys.modules])"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.stdout.splitlines()[-1] == "[]"


def test_the_json_list_has_the_shape_of_a_report() -> None:
    for arguments in (("--list", "--json"), ("--json", "--list"), ("list", "--json")):
        report = json.loads(run(*arguments).stdout)
        assert list(report) == ["trl_hotfix", "trl", "python", "digest", "patches", "known"]
        (patch,) = (row for row in report["patches"] if row["id"] == ID)
        assert list(patch) == [
            *("id", "revision", "title", "severity", "trl", "upstream", "review_by", "not_repaired", "state"),
            *("reason", "options", "evidence", "called", "acted", "targets"),
        ]
        assert (patch["state"], patch["reason"]) == ("pending", "applies")
        assert list(patch["targets"][0]) == ["module", "attribute", "trl", "called", "state"]
        assert patch["targets"][0]["called"] == "step"


def test_a_fixed_release_is_retired_with_exit_0(tmp_path: Path) -> None:
    process = run("--list", "--json", PYTHONPATH=without_trl(tmp_path, "0.12.0"))
    (patch,) = (row for row in json.loads(process.stdout)["patches"] if row["id"] == ID)
    assert (patch["state"], patch["reason"]) == ("retired", "fixed-upstream")
    assert patch["evidence"]["fixed_in"] == "0.12.0"
    assert process.returncode == 0


def test_list_shows_the_most_severe_patches_first() -> None:
    patches = {patch["id"]: patch for patch in json.loads(run("list", "--json").stdout)["patches"]}
    process = run("list")
    assert process.returncode == 0, process.stderr
    pending = [patch["id"] for patch in patches.values() if patch["state"] == "pending"]
    rows = [line.split()[0] for line in process.stdout.splitlines() if line.strip() and line.split()[0] in patches]
    assert rows == pending
    severities = [patches[patch_id]["severity"] for patch_id in pending]
    assert severities == sorted(severities, key=[severity.value for severity in Severity].index)
    assert f"{len(patches) - len(pending)} patches are for other releases than TRL 0.11.4: --all" in process.stdout


def test_list_filters_by_release_severity_and_trainer() -> None:
    process = run("list", "--json", "--trl", "0.16.1", "--severity", "data-loss")
    report = json.loads(process.stdout)
    assert report["trl"] == "0.16.1"
    assert {patch["severity"] for patch in report["patches"]} == {"data-loss"}
    states = {patch["id"]: patch["state"] for patch in report["patches"]}
    assert states["grpo-resume-replays-epoch-0-order"] == "pending"
    of_unknown = run("list", "--trl", "9.0.0")
    assert "TRL 9.0.0 is not among the releases that were proved" in of_unknown.stderr
    assert "may apply: TRL 9.0.0 is not proved" in of_unknown.stdout
    assert "has this bug" not in of_unknown.stdout
    assert "there is no TRL 0.16.7; did you mean '0.16." in run("list", "--trl", "0.16.7").stderr
    of_kto = json.loads(run("list", "--json", "--trainer", "KTOTrainer").stdout)["patches"]
    assert ID in {patch["id"] for patch in of_kto}
    assert "grpo-loss-normalisation" not in {patch["id"] for patch in of_kto}
    assert "did you mean 'GRPO'?" in run("list", "--trainer", "gpro").stderr
    assert "is not a version such as" in run("list", "--trl", "latest").stderr
    assert run("list", "--trl", "0.9.0").returncode == 4


def test_known_bugs_stand_apart_from_the_patches() -> None:
    known = {bug.id: bug for bug in loading.without_repair()}
    report = json.loads(run("list", "--json", "--trl", "0.28.0").stdout)
    assert not known.keys() & {patch["id"] for patch in report["patches"]}
    assert {bug["id"]: bug["trl"] for bug in report["known"]} == {bug.id: bug.trl for bug in known.values()}
    here = {bug["id"] for bug in report["known"] if bug["here"]}
    elsewhere = known.keys() - here
    of_others = {bug_id for bug_id in here if not any({"GRPO", "*"} & {*hit.trainers} for hit in known[bug_id].hits)}
    assert here
    assert elsewhere
    assert of_others
    patches, heading, below = run("list", "--trl", "0.28.0").stdout.partition("Known, no repair here")
    assert heading
    assert {line.strip() for line in below.splitlines()} & known.keys() == here
    assert not any(bug_id in patches for bug_id in known)
    of_grpo = run("list", "--trl", "0.28.0", "--trainer", "grpo").stdout
    assert not any(bug_id in of_grpo for bug_id in of_others)
    assert "Known, no repair here" not in run("list", "--trl", "0.28.0", "--severity", "crash").stdout
    everything = run("list", "--trl", "0.28.0", "--all").stdout
    assert all(bug_id in everything for bug_id in known)


def test_list_all_shows_what_is_not_repaired() -> None:
    patch_id = "orpo-nan-gradient-near-certainty"
    patches = json.loads(run("list", "--json").stdout)["patches"]
    texts = {patch["id"]: patch["not_repaired"] for patch in patches}
    assert texts == {patch.id: patch.not_repaired for patch in loading.load()}
    assert texts[ID] is None
    lines = " ".join(run("list", "--all").stdout.split())
    assert f"not repaired: {texts[patch_id].split(maxsplit=1)[0]}" in lines
    assert lines.count("not repaired: ") == sum(text is not None for text in texts.values())
    assert "not repaired: " not in run("list").stdout
