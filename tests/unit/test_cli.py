"""The command line: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import versions
from trl_hotfix.model import Severity

CHECKOUT = Path(__file__).parents[2]
ID = "moe-aux-loss-lost-under-deepspeed"


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    command = [sys.executable, "-m", "trl_hotfix", *arguments]
    # `python -m` puts the working folder first on the path: not the checkout, where a test has a copy of the package.
    cwd = CHECKOUT / "tests"
    return subprocess.run(command, env={**kept, **variables}, cwd=cwd, capture_output=True, text=True, check=False)


def test_the_list_says_what_applies_here_and_why() -> None:
    process = run("--list")
    assert process.returncode == 0, process.stderr
    assert ID in process.stdout
    assert "applies: TRL 0.11.4 has this bug" in process.stdout


def test_list_all_is_the_same_as_dash_dash_list_and_imports_neither_torch_nor_trl() -> None:
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
        assert list(report) == ["trl_hotfix", "trl", "python", "digest", "patches"]
        (patch,) = (row for row in report["patches"] if row["id"] == ID)
        assert list(patch) == [
            *("id", "revision", "title", "severity", "trl", "upstream", "review_by", "state", "reason", "options"),
            *("evidence", "targets"),
        ]
        assert (patch["state"], patch["reason"]) == ("pending", "applies")
        assert list(patch["targets"][0]) == ["module", "attribute", "trl", "state"]


def test_an_unknown_option_in_the_environment_is_a_usage_error() -> None:
    process = run("list", TRL_HOTFIX_OPTIONS="grpo-loss-normalisation.normalization=global")
    assert process.returncode == 2
    assert "has no option 'normalization'; did you mean 'normalisation'?" in process.stderr


def test_verify_shows_red_green_red_with_the_numbers() -> None:
    process = run("--verify", ID)
    assert process.returncode == 0, process.stderr
    for expected in ("proven", "red", "reproduced", "green", "fixed", "red again", "1.693147"):
        assert expected in process.stdout
    (cell,) = json.loads(run("verify", "--json", ID).stdout)["cells"]
    assert cell["verdict"] == "proven"
    assert [run_record["verdict"] for run_record in cell["leaves"]["trl.trainer.dpo_trainer"].values()] == [
        *("reproduced", "fixed", "reproduced"),
    ]


def test_a_wrapper_that_repairs_nothing_is_unrepaired_and_exit_1(package: Path) -> None:
    module = package / "patches" / "moe_aux_loss_lost_under_deepspeed.py"
    repair = "    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)\n"
    assert repair in module.read_text()
    module.write_text(module.read_text().replace(repair, ""))
    process = run("--verify", ID, PYTHONPATH=str(package.parent))
    assert process.returncode == 1, process.stderr
    assert "unrepaired" in process.stdout


@pytest.mark.parametrize(
    "arguments", [("--lits",), ("lits",), ("list", "--jsn"), ("verify", "moe-aux-los"), ("--list", "extra")]
)
def test_wrong_usage_is_exit_2_with_one_clear_line(arguments: tuple[str, ...]) -> None:
    process = run(*arguments)
    assert process.returncode == 2
    assert "Traceback" not in process.stderr


def test_an_unknown_id_in_the_environment_is_exit_2() -> None:
    process = run("--list", TRL_HOTFIX_ONLY="moe-aux-loss-lost-under-deepsped")
    assert process.returncode == 2
    assert "unknown patch in TRL_HOTFIX_ONLY" in process.stderr
    assert f"did you mean '{ID}'?" in process.stderr


def test_a_broken_manifest_is_exit_3_with_every_mistake_and_its_line(package: Path) -> None:
    manifest = package / "patches.yaml"
    text = manifest.read_text().replace("severity: wrong-gradient", "severity: bad", 1).replace("title:", "tittle:", 1)
    manifest.write_text(text)
    for arguments in (("--list",), ("list", "--json"), ("verify",)):
        process = run(*arguments, PYTHONPATH=str(package.parent))
        assert process.returncode == 3
        assert "has 3 mistakes" in process.stderr
        assert "did you mean 'title'?" in process.stderr
        assert process.stderr.count("  line ") == 3
        assert process.stdout == ""


def test_damaged_evidence_is_exit_3_and_says_what_to_do(package: Path) -> None:
    (package / "data" / "proven.json").write_text("{")
    process = run("--list", PYTHONPATH=str(package.parent))
    assert process.returncode == 3
    assert "install trl_hotfix again" in process.stderr
    assert "Traceback" not in process.stderr


def test_apply_raises_for_a_broken_manifest_and_changes_nothing(package: Path) -> None:
    (package / "patches.yaml").write_text("- id: [")
    code = (
        "import sys, trl_hotfix\nbefore = list(sys.meta_path)\n"
        "try: trl_hotfix.apply()\nexcept trl_hotfix.CatalogueError as error: print(error.mistakes[0].line)\n"
        "print(sys.meta_path == before)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.stdout == "1\nTrue\n", process.stderr


def without_trl(tmp_path: Path, version: str | None) -> str:
    """A folder for PYTHONPATH in which TRL is of this version, or is not to be found."""
    if version is None:
        hidden = tmp_path / "sitecustomize.py"
        hidden.write_text(
            "import importlib.metadata as m\nreal = m.distribution\n"
            "def distribution(name):\n    if name == 'trl': raise m.PackageNotFoundError(name)\n    return real(name)\n"
            "m.distribution = distribution\n"
        )
    else:
        folder = tmp_path / f"trl-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: trl\nVersion: {version}\n")
    return str(tmp_path)


@pytest.mark.parametrize("version", [None, "0.7.4"])
@pytest.mark.parametrize("command", ["--list", "--verify"])
def test_no_trl_or_one_that_is_not_supported_is_exit_4(tmp_path: Path, version: str | None, command: str) -> None:
    process = run(command, PYTHONPATH=without_trl(tmp_path, version))
    assert process.returncode == 4, process.stderr


def test_a_release_with_the_fix_is_retired_and_exit_0(tmp_path: Path) -> None:
    process = run("--list", "--json", PYTHONPATH=without_trl(tmp_path, "0.12.0"))
    (patch,) = (row for row in json.loads(process.stdout)["patches"] if row["id"] == ID)
    assert (patch["state"], patch["reason"]) == ("retired", "fixed-upstream")
    assert patch["evidence"]["fixed_in"] == "0.12.0"
    assert process.returncode == 0


def test_list_shows_what_applies_here_the_worst_first_and_counts_the_rest() -> None:
    patches = {patch["id"]: patch for patch in json.loads(run("list", "--json").stdout)["patches"]}
    process = run("list")
    assert process.returncode == 0, process.stderr
    pending = [patch["id"] for patch in patches.values() if patch["state"] == "pending"]
    rows = [line.split()[0] for line in process.stdout.splitlines() if line.strip() and line.split()[0] in patches]
    assert rows == pending
    severities = [patches[patch_id]["severity"] for patch_id in pending]
    assert severities == sorted(severities, key=[severity.value for severity in Severity].index)
    assert f"{len(patches) - len(pending)} patches are for other releases than TRL 0.11.4: --all" in process.stdout


def test_list_answers_for_a_release_that_is_not_installed_and_for_one_severity() -> None:
    process = run("list", "--json", "--trl", "0.16.1", "--severity", "data-loss")
    report = json.loads(process.stdout)
    assert report["trl"] == "0.16.1"
    assert {patch["severity"] for patch in report["patches"]} == {"data-loss"}
    states = {patch["id"]: patch["state"] for patch in report["patches"]}
    assert states["grpo-resume-replays-epoch-0-order"] == "pending"
    assert "is none of the" in run("list", "--trl", "9.0.0").stdout
    assert "there is no TRL 0.16.7; did you mean '0.16." in run("list", "--trl", "0.16.7").stderr
    of_kto = json.loads(run("list", "--json", "--trainer", "KTOTrainer").stdout)["patches"]
    assert ID in {patch["id"] for patch in of_kto}
    assert "grpo-loss-normalisation" not in {patch["id"] for patch in of_kto}
    assert "did you mean 'GRPO'?" in run("list", "--trainer", "gpro").stderr
    assert "is not a version such as" in run("list", "--trl", "latest").stderr
    assert run("list", "--trl", "0.9.0").returncode == 4


def test_explain_says_why_a_patch_goes_on_here_gate_by_gate() -> None:
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


def is_in_this_release(target: dict[str, str]) -> bool:
    return versions.in_range("0.11.4", target["trl"])


def test_explain_says_at_which_gate_a_patch_stops() -> None:
    answer = json.loads(run("explain", "grpo-loss-normalisation", "--json").stdout)
    assert (answer["state"], answer["trail"][-1]["passed"]) == ("skipped", False)
    assert answer["trail"][-1]["gate"] == "TRL"
    skipped = json.loads(run("explain", ID, "--json", TRL_HOTFIX_SKIP=ID).stdout)
    assert skipped["state"] == "disabled"
    assert skipped["trail"][0] == {"gate": "selection", "found": skipped["trail"][0]["found"], "passed": False}
    unknown = run("explain", "moe-aux-los")
    assert unknown.returncode == 2
    assert "unknown patch in explain" in unknown.stderr


def test_explain_shows_what_the_installed_trl_has_changed_since_another(tmp_path: Path) -> None:
    """The other is the installed one with one more line in the patched method."""
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


def test_verify_full_trains_without_the_patch_with_it_and_without_it_again() -> None:
    process = run("verify", "--full", "--json", "dpo-eval-reference-from-trained-policy", ID)
    assert process.returncode == 0, process.stderr
    proofs = {proof["patch"]: proof for proof in json.loads(process.stdout)["proofs"]}
    trained = proofs["dpo-eval-reference-from-trained-policy"]
    assert trained["verdict"] == "proven"
    assert [run_record["verdict"] for run_record in trained["runs"].values()] == ["reproduced", "fixed", "reproduced"]
    assert trained["runs"]["red"]["loss"] != trained["runs"]["green"]["loss"]
    # What a proof needs and this environment has not is said, and is no failure.
    assert (proofs[ID]["verdict"], proofs[ID]["why"]) == ("not-run", "it needs scikit-learn")


def test_verify_says_which_self_test_ended_the_process_and_exits_2(package: Path) -> None:
    module = package / "patches" / "moe_aux_loss_lost_under_deepspeed.py"
    text = module.read_text()
    self_test = next(patch.self_test for patch in loading.load() if patch.id == ID)
    start = text.index(f"def {self_test}(")
    body = text.index('"""', text.index('"""', start) + 3) + 3
    module.write_text(f"{text[:body]}\n    import os\n\n    os._exit(9)\n{text[body:]}")
    process = run("verify", ID, PYTHONPATH=str(package.parent))
    assert process.returncode == 2
    assert f"ended with exit code 9; {ID} was next" in process.stderr


@pytest.mark.parametrize("command", [["list", "--all"], ["explain", "orpo-nan-gradient-near-certainty"]])
def test_what_is_piped_can_be_pasted(command: list[str]) -> None:
    process = run(*command)
    assert process.returncode == 0, process.stderr
    assert "\x1b" not in process.stdout
    assert [line for line in process.stdout.splitlines() if line != line.rstrip()] == []
