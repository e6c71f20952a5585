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
    done = run("--list")
    assert done.returncode == 0, done.stderr
    assert ID in done.stdout
    assert "applies: TRL 0.11.4 has this bug" in done.stdout


def test_list_all_is_the_same_as_dash_dash_list_and_imports_neither_torch_nor_trl() -> None:
    assert run("list", "--all").stdout == run("--list").stdout
    code = (
        "import sys; from trl_hotfix.commands.main import main\ntry: main(['--list'])\n"
        "finally: print([name for name in ('torch', 'trl', 'wrapt') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_json_list_has_the_shape_of_a_report() -> None:
    for arguments in (("--list", "--json"), ("--json", "--list"), ("list", "--json")):
        report = json.loads(run(*arguments).stdout)
        assert list(report) == ["trl_hotfix", "trl", "python", "digest", "patches"]
        (patch,) = (each for each in report["patches"] if each["id"] == ID)
        assert list(patch) == [
            *("id", "revision", "title", "severity", "trl", "upstream", "review_by", "not_repaired", "state"),
            *("reason", "options", "evidence", "targets"),
        ]
        assert (patch["state"], patch["reason"]) == ("pending", "applies")
        assert list(patch["targets"][0]) == ["module", "attribute", "trl", "state"]


def test_an_unknown_option_in_the_environment_is_a_usage_error() -> None:
    done = run("list", TRL_HOTFIX_OPTIONS="grpo-loss-normalisation.normalization=global")
    assert done.returncode == 2
    assert "has no option 'normalization'; did you mean 'normalisation'?" in done.stderr


def test_verify_shows_red_green_red_with_the_numbers() -> None:
    done = run("--verify", ID)
    assert done.returncode == 0, done.stderr
    for expected in ("proven", "red", "reproduced", "green", "fixed", "red again", "1.693147"):
        assert expected in done.stdout
    (cell,) = json.loads(run("verify", "--json", ID).stdout)["cells"]
    assert cell["verdict"] == "proven"
    assert [seen["verdict"] for seen in cell["leaves"]["trl.trainer.dpo_trainer"].values()] == [
        *("reproduced", "fixed", "reproduced"),
    ]


def test_a_wrapper_that_repairs_nothing_is_unrepaired_and_exit_1(package: Path) -> None:
    module = package / "patches" / "moe_aux_loss_lost_under_deepspeed.py"
    repair = "    args, kwargs = with_coefficient_of_plain_model(wrapped, instance, args, kwargs)\n"
    assert repair in module.read_text()
    module.write_text(module.read_text().replace(repair, ""))
    done = run("--verify", ID, PYTHONPATH=str(package.parent))
    assert done.returncode == 1, done.stderr
    assert "unrepaired" in done.stdout


@pytest.mark.parametrize(
    "arguments", [("--lits",), ("lits",), ("list", "--jsn"), ("verify", "moe-aux-los"), ("--list", "extra")]
)
def test_wrong_usage_is_exit_2_with_one_clear_line(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_an_unknown_id_in_the_environment_is_exit_2() -> None:
    done = run("--list", TRL_HOTFIX_ONLY="moe-aux-loss-lost-under-deepsped")
    assert done.returncode == 2
    assert "unknown patch in TRL_HOTFIX_ONLY" in done.stderr
    assert f"did you mean '{ID}'?" in done.stderr


def test_a_broken_manifest_is_exit_3_with_every_mistake_and_its_line(package: Path) -> None:
    manifest = package / "patches.yaml"
    text = manifest.read_text().replace("severity: wrong-gradient", "severity: bad", 1).replace("title:", "tittle:", 1)
    manifest.write_text(text)
    for arguments in (("--list",), ("list", "--json"), ("verify",)):
        done = run(*arguments, PYTHONPATH=str(package.parent))
        assert done.returncode == 3
        assert "has 3 mistakes" in done.stderr
        assert "did you mean 'title'?" in done.stderr
        assert done.stderr.count("  line ") == 3
        assert done.stdout == ""


def test_damaged_evidence_is_exit_3_and_says_what_to_do(package: Path) -> None:
    (package / "data" / "proven.json").write_text("{")
    done = run("--list", PYTHONPATH=str(package.parent))
    assert done.returncode == 3
    assert "install trl_hotfix again" in done.stderr
    assert "Traceback" not in done.stderr


def test_apply_raises_for_a_broken_manifest_and_changes_nothing(package: Path) -> None:
    (package / "patches.yaml").write_text("- id: [")
    code = (
        "import sys, trl_hotfix\nbefore = list(sys.meta_path)\n"
        "try: trl_hotfix.apply()\nexcept trl_hotfix.CatalogueError as error: print(error.mistakes[0].line)\n"
        "print(sys.meta_path == before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(package.parent)},
        cwd=package.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "1\nTrue\n", done.stderr


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
    done = run(command, PYTHONPATH=without_trl(tmp_path, version))
    assert done.returncode == 4, done.stderr


def test_a_release_with_the_fix_is_retired_and_exit_0(tmp_path: Path) -> None:
    done = run("--list", "--json", PYTHONPATH=without_trl(tmp_path, "0.12.0"))
    (patch,) = (each for each in json.loads(done.stdout)["patches"] if each["id"] == ID)
    assert (patch["state"], patch["reason"]) == ("retired", "fixed-upstream")
    assert patch["evidence"]["fixed_in"] == "0.12.0"
    assert done.returncode == 0


def test_list_shows_what_applies_here_the_worst_first_and_counts_the_rest() -> None:
    every = {each["id"]: each for each in json.loads(run("list", "--json").stdout)["patches"]}
    done = run("list")
    assert done.returncode == 0, done.stderr
    here = [each["id"] for each in every.values() if each["state"] == "pending"]
    rows = [line.split()[0] for line in done.stdout.splitlines() if line.strip() and line.split()[0] in every]
    assert rows == here
    severities = [every[each]["severity"] for each in here]
    assert severities == sorted(severities, key=[each.value for each in Severity].index)
    assert f"{len(every) - len(here)} patches are for other releases than TRL 0.11.4: --all" in done.stdout


def test_list_answers_for_a_release_that_is_not_installed_and_for_one_severity() -> None:
    done = run("list", "--json", "--trl", "0.16.1", "--severity", "data-loss")
    report = json.loads(done.stdout)
    assert report["trl"] == "0.16.1"
    assert {each["severity"] for each in report["patches"]} == {"data-loss"}
    states = {each["id"]: each["state"] for each in report["patches"]}
    assert states["grpo-resume-replays-epoch-0-order"] == "pending"
    assert "is none of the" in run("list", "--trl", "9.0.0").stdout
    assert "there is no TRL 0.16.7; did you mean '0.16." in run("list", "--trl", "0.16.7").stderr
    of_kto = json.loads(run("list", "--json", "--trainer", "KTOTrainer").stdout)["patches"]
    assert ID in {each["id"] for each in of_kto}
    assert "grpo-loss-normalisation" not in {each["id"] for each in of_kto}
    assert "did you mean 'GRPO'?" in run("list", "--trainer", "gpro").stderr
    assert "is not a version such as" in run("list", "--trl", "latest").stderr
    assert run("list", "--trl", "0.9.0").returncode == 4


def test_list_all_has_what_is_not_repaired() -> None:
    patch_id = "orpo-nan-gradient-near-certainty"
    patches = json.loads(run("list", "--json").stdout)["patches"]
    texts = {patch["id"]: patch["not_repaired"] for patch in patches}
    assert texts == {patch.id: patch.not_repaired for patch in loading.load()}
    assert texts[ID] is None
    lines = " ".join(run("list", "--all").stdout.split())
    assert f"not repaired: {texts[patch_id].split(maxsplit=1)[0]}" in lines
    assert lines.count("not repaired: ") == sum(text is not None for text in texts.values())
    assert "not repaired: " not in run("list").stdout


def test_explain_has_what_is_not_repaired() -> None:
    patch_id = "orpo-nan-gradient-near-certainty"
    (patch,) = (patch for patch in loading.load() if patch.id == patch_id)
    assert patch.not_repaired
    assert json.loads(run("explain", patch_id, "--json").stdout)["not_repaired"] == patch.not_repaired
    screen = run("explain", patch_id).stdout
    assert " ".join(patch.not_repaired.split()) in " ".join(screen.partition("What is not repaired")[2].split())
    assert json.loads(run("explain", ID, "--json").stdout)["not_repaired"] is None
    assert "What is not repaired" not in run("explain", ID).stdout


def test_explain_says_why_a_patch_goes_on_here_gate_by_gate() -> None:
    done = run("explain", ID)
    assert done.returncode == 0, done.stderr
    for expected in ("What you see, and why", "What the patch does", "TRL_HOTFIX_SKIP=" + ID, "the bug was reproduced"):
        assert expected in done.stdout
    answer = json.loads(run("explain", ID, "--json").stdout)
    assert all(step["passed"] for step in answer["trail"])
    bodies = [step["gate"] for step in answer["trail"] if step["gate"].startswith("body of")]
    assert bodies == [f"body of {each['module']}: {each['attribute']}" for each in answer["targets"] if here(each)]
    assert answer["notes"].startswith("The router auxiliary loss")
    assert answer["proofs"]


def here(target: dict[str, str]) -> bool:
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
    other = tmp_path / "trl/trainer/dpo_trainer.py"
    head = "    def get_batch_loss_metrics("
    text = other.read_text()
    at = text.index('"""', text.index('"""', text.index(head)) + 3) + 3
    other.write_text(f"{text[:at]}\n        was_here = True\n{text[at:]}")
    differences = json.loads(run("explain", ID, "--json", "--against", str(tmp_path)).stdout)["differences"]
    assert [line for line in "\n".join(differences.values()).splitlines() if line[:1] in "+-"] == [
        *("--- TRL 0.11.3", "+++ TRL 0.11.4", "-    was_here = True"),
    ]
    assert "-    was_here = True" in run("explain", ID, "--against", str(tmp_path)).stdout
    refused = run("explain", ID, "--against", str(tmp_path / "trl"))
    assert refused.returncode == 2
    assert "is not a wheel of TRL" in refused.stderr


def test_verify_full_trains_without_the_patch_with_it_and_without_it_again() -> None:
    done = run("verify", "--full", "--json", "dpo-eval-reference-from-trained-policy", ID)
    assert done.returncode == 0, done.stderr
    proofs = {each["patch"]: each for each in json.loads(done.stdout)["proofs"]}
    trained = proofs["dpo-eval-reference-from-trained-policy"]
    assert trained["verdict"] == "proven"
    assert [seen["verdict"] for seen in trained["runs"].values()] == ["reproduced", "fixed", "reproduced"]
    assert trained["runs"]["red"]["loss"] != trained["runs"]["green"]["loss"]
    # What a proof needs and this environment has not is said, and is no failure.
    assert (proofs[ID]["verdict"], proofs[ID]["why"]) == ("not-run", "it needs scikit-learn")


def test_verify_says_which_self_test_ended_the_process_and_exits_2(package: Path) -> None:
    module = package / "patches" / "moe_aux_loss_lost_under_deepspeed.py"
    text = module.read_text()
    self_test = next(each.self_test for each in loading.load() if each.id == ID)
    start = text.index(f"def {self_test}(")
    body = text.index('"""', text.index('"""', start) + 3) + 3
    module.write_text(f"{text[:body]}\n    import os\n\n    os._exit(9)\n{text[body:]}")
    done = run("verify", ID, PYTHONPATH=str(package.parent))
    assert done.returncode == 2
    assert f"ended with exit code 9; {ID} was next" in done.stderr


@pytest.mark.parametrize("command", [["list", "--all"], ["explain", "orpo-nan-gradient-near-certainty"]])
def test_what_is_piped_can_be_pasted(command: list[str]) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert [line for line in done.stdout.splitlines() if line != line.rstrip()] == []
