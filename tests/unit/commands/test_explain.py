"""``trl-hotfix explain``: each gate of a patch, and the difference between two releases."""

from __future__ import annotations

import json
import shutil
from importlib import metadata
from pathlib import Path

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import versions

from helpers.command_line import ID, run


def is_in_this_release(target: dict[str, str]) -> bool:
    return versions.in_range("0.11.4", target["trl"])


def test_explain_shows_each_gate_of_an_applicable_patch() -> None:
    process = run("explain", ID)
    assert process.returncode == 0, process.stderr
    for expected in ("What you see, and why", "What the patch does", "TRL_HOTFIX_SKIP=" + ID, "the bug was reproduced"):
        assert expected in process.stdout
    answer = json.loads(run("explain", ID, "--json").stdout)
    assert all(step["passed"] for step in answer["trail"])
    bodies = [step["gate"] for step in answer["trail"] if step["gate"].startswith("body of")]
    assert bodies == [
        f"body of {target['module']}: {target['attribute']}"
        for target in answer["targets"]
        if is_in_this_release(target)
    ]
    assert answer["notes"].startswith("The router auxiliary loss")
    assert answer["proofs"]


def test_explain_shows_the_gate_that_stops_a_patch() -> None:
    answer = json.loads(run("explain", "grpo-dapo-normaliser", "--json").stdout)
    assert (answer["state"], answer["trail"][-1]["passed"]) == ("skipped", False)
    assert answer["trail"][-1]["gate"] == "TRL"
    skipped = json.loads(run("explain", ID, "--json", TRL_HOTFIX_SKIP=ID).stdout)
    assert skipped["state"] == "disabled"
    assert skipped["trail"][0] == {"gate": "selection", "found": skipped["trail"][0]["found"], "passed": False}
    unknown = run("explain", "moe-aux-lss")
    assert unknown.returncode == 2
    assert "unknown patch in explain" in unknown.stderr


def test_a_part_of_an_id_is_enough_if_one_bug_has_it() -> None:
    assert (
        json.loads(run("explain", "Aux-loss-lost-under", "--json").stdout)["id"] == "moe-aux-loss-lost-under-deepspeed"
    )
    assert json.loads(run("explain", "with-trained-policy", "--json").stdout)["revision"] is None
    several = run("explain", "grpo")
    assert (several.returncode, several.stdout) == (2, "")
    listed = [line.strip() for line in several.stderr.splitlines()[1:]]
    assert listed == sorted(bug.id for bug in (*loading.load(), *loading.without_repair()) if "grpo" in bug.id)


def test_explain_shows_the_difference_to_another_release(tmp_path: Path) -> None:
    """The other release is the installed one with one more line in the patched method."""
    installed = Path(str(metadata.distribution("trl").locate_file("")))
    (tmp_path / "trl-0.11.3.dist-info").mkdir()
    shutil.copytree(installed / "trl", tmp_path / "trl", ignore=shutil.ignore_patterns("*.pyc"))
    module = tmp_path / "trl/trainer/dpo_trainer.py"
    head = "    def get_batch_loss_metrics("
    text = module.read_text()
    end_of_docstring = text.index('"""', text.index('"""', text.index(head)) + 3) + 3
    module.write_text(f"{text[:end_of_docstring]}\n        was_here = True\n{text[end_of_docstring:]}")
    differences = json.loads(run("explain", ID, "--json", "--against", str(tmp_path)).stdout)["differences"]
    assert [line for line in "\n".join(differences.values()).splitlines() if line[:1] in "+-"] == [
        *("--- TRL 0.11.3", "+++ TRL 0.11.4", "-    was_here = True"),
    ]
    assert "-    was_here = True" in run("explain", ID, "--against", str(tmp_path)).stdout
    refused = run("explain", ID, "--against", str(tmp_path / "trl"))
    assert refused.returncode == 2
    assert "is not a wheel of TRL" in refused.stderr


def test_explain_shows_what_is_not_repaired() -> None:
    patch_id = "orpo-nan-gradient-near-certainty"
    (patch,) = (patch for patch in loading.load() if patch.id == patch_id)
    assert patch.not_repaired
    assert json.loads(run("explain", patch_id, "--json").stdout)["not_repaired"] == patch.not_repaired
    screen = run("explain", patch_id).stdout
    assert " ".join(patch.not_repaired.split()) in " ".join(screen.partition("What is not repaired")[2].split())
    assert json.loads(run("explain", ID, "--json").stdout)["not_repaired"] is None
    assert "What is not repaired" not in run("explain", ID).stdout


def test_a_bug_without_a_repair_is_explained_and_nothing_of_a_patch_is_said() -> None:
    bug_id = "dpo-evaluate-precomputes-with-trained-policy"
    process = run("explain", bug_id)
    assert process.returncode == 0, process.stderr
    assert "Here: known, no repair here; fixed in TRL 1.9.0" in process.stdout
    assert "TRL 0.11.4 does not have this bug (>=1.7.0,<1.9.0)" in process.stdout
    assert "What the patch does" not in process.stdout
    assert "TRL_HOTFIX_SKIP" not in process.stdout
    answer = json.loads(run("explain", bug_id, "--json").stdout)
    assert (answer["state"], answer["reason"]) == ("known", "no-repair")
    assert (answer["revision"], answer["how"], answer["targets"], answer["trail"]) == (None, None, [], [])
    assert answer["when"][0].startswith("DPO, KTO; precompute_ref_log_probs: true; ref_model: unset")
    patch = json.loads(run("explain", ID, "--json").stdout)
    assert patch["when"][0].startswith("DPO; TRL >=0.11.0; if the model is a mixture of experts")
    refused = run("explain", bug_id, "--against", "trl.whl")
    assert (refused.returncode, "wraps no method" in refused.stderr) == (2, True)
    assert f"did you mean '{bug_id}'?" in run("explain", "dpo-evaluate-precomputes-with-traned-policy").stderr


def test_a_bug_without_a_repair_cannot_be_asked_for() -> None:
    process = run("list", TRL_HOTFIX_ONLY="dpo-evaluate-precomputes-with-trained-policy")
    assert process.returncode == 2
    assert "'dpo-evaluate-precomputes-with-trained-policy', a known bug that has no repair here" in process.stderr
