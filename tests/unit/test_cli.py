"""The command line: what it prints, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

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


def test_list_is_the_same_as_dash_dash_list_and_imports_neither_torch_nor_trl() -> None:
    assert run("list").stdout == run("--list").stdout
    code = (
        "import sys; from trl_hotfix.cli import main\ntry: main(['--list'])\n"
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
            *("id", "revision", "title", "severity", "trl", "upstream", "review_by", "state", "reason", "options"),
            *("evidence", "targets"),
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
    (package / "evidence.json").write_text("{")
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
            "import importlib.metadata as m\nreal = m.version\n"
            "def version(name):\n    if name == 'trl': raise m.PackageNotFoundError(name)\n    return real(name)\n"
            "m.version = version\n"
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
