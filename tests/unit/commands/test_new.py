"""``trl-hotfix new``: the three parts of a new patch in a checkout."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers.command_line import CHECKOUT, ID, run

from trl_hotfix.commands.new import Answer

NEW = "dpo-made-up-bug"


@pytest.fixture
def checkout(package: Path) -> Path:
    """Copy what ``new`` looks for in a checkout; the package of the copy is the one that runs."""
    folder = package.parent
    for name in ("pyproject.toml", "patches.yaml", "known.yaml"):
        shutil.copy(CHECKOUT / name, folder)
    (folder / "tests" / "proofs").mkdir(parents=True)
    shutil.copytree(CHECKOUT / "tests" / "tiny", folder / "tests" / "tiny")
    return folder


TARGET = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"


def new(checkout: Path, *arguments: str, target: str = TARGET, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(checkout), variables.pop("PYTHONPATH", "")]))
    return run("new", *arguments, "--target", target, PYTHONPATH=path, **variables)


def as_listed(checkout: Path, patch_id: str) -> dict[str, Any]:
    process = run("list", "--json", PYTHONPATH=str(checkout))
    assert process.returncode == 0, process.stderr
    return next(patch for patch in json.loads(process.stdout)["patches"] if patch["id"] == patch_id)


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def test_new_writes_an_entry_a_module_and_a_proof(checkout: Path) -> None:
    before = everything(checkout)
    process = new(checkout, NEW, "--pull", "1234", "--title", 'The "loss": wrong by 2')
    assert process.returncode == 0, process.stderr
    after = everything(checkout)
    module, proof = "trl_hotfix/patches/dpo_made_up_bug.py", "tests/proofs/dpo_made_up_bug.py"
    assert set(after) - set(before) == {module, proof}
    assert [name for name in before if before[name] != after[name]] == ["patches.yaml"]
    assert after["patches.yaml"].startswith(before["patches.yaml"])
    listed = as_listed(checkout, NEW)
    assert (listed["id"], listed["title"], listed["severity"]) == (NEW, 'The "loss": wrong by 2', "wrong-loss")
    assert (listed["trl"], listed["review_by"], listed["upstream"]["fix"]) == ("==0.11.4", None, 1234)
    assert (listed["state"], listed["revision"]) == ("pending", 1)
    assert [target["called"] for target in listed["targets"]] == ["some steps"]
    script = checkout / "train.py"
    script.write_text("from trl import DPOTrainer\nDPOTrainer(model)\n")
    scanned = run("scan", str(script), PYTHONPATH=str(checkout))
    assert NEW in scanned.stdout, scanned.stderr
    verified = run("verify", NEW, "--json", PYTHONPATH=str(checkout))
    (cell,) = json.loads(verified.stdout)["cells"]
    assert (verified.returncode, cell["verdict"]) == (1, "error")
    assert "write the self-test first" in cell["why"]
    # ruff accepts the templates as they are written.
    ruff = [sys.executable, "-m", "ruff"]
    for check in (["check"], ["format", "--check"]):
        command = [*ruff, *check, "--config", str(CHECKOUT / "pyproject.toml"), module, proof]
        style = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert style.returncode == 0, style.stdout
    for order, next_step in enumerate(
        ("trl-hotfix verify", "says `proven`", "bench.py run", "trl-hotfix scan", "make matrix"), 1
    ):
        assert f"  {order}. " in process.stdout
        assert next_step in process.stdout


def test_a_new_patch_of_a_constructor_is_called_in_constructions(checkout: Path) -> None:
    new(checkout, NEW, target="trl.trainer.dpo_trainer:DPOTrainer.__init__")
    assert [target["called"] for target in as_listed(checkout, NEW)["targets"]] == ["construction"]


def test_the_proof_of_a_new_patch_is_not_implemented(checkout: Path) -> None:
    new(checkout, NEW)
    code = "import dpo_made_up_bug as proof\nfor function in (proof.train, proof.unaffected):\n    try: function()\n"
    code += "    except NotImplementedError as error: print(str(error)[:21])\n"
    folders = [CHECKOUT, checkout / "tests", checkout / "tests" / "proofs"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.stdout == "write the proof first\n" * 2, process.stderr


def test_new_prints_what_it_wrote_as_json(checkout: Path) -> None:
    process = new(checkout, NEW, "--json")
    answer = msgspec.json.decode(process.stdout.encode(), type=Answer, strict=True)
    assert all((checkout / answer[part]).is_file() for part in ("manifest", "module", "proof"))
    assert (answer["id"], answer["trl"], set(json.loads(process.stdout))) == (NEW, "==0.11.4", set(answer))


@pytest.mark.parametrize(("specifiers", "reviewed"), [(">=0.9.6", True), (">=0.9.6,<0.12", False), ("==0.11.*", False)])
def test_a_new_range_without_an_end_has_a_review_date(checkout: Path, specifiers: str, reviewed: bool) -> None:
    assert new(checkout, NEW, "--trl", specifiers).returncode == 0
    patch = as_listed(checkout, NEW)
    assert (patch["trl"], patch["review_by"] is not None) == (specifiers, reviewed)


def test_a_target_may_be_what_trls_class_inherits_from_transformers(checkout: Path) -> None:
    process = new(checkout, NEW, target="trl.trainer.dpo_trainer:DPOTrainer.training_step")
    assert process.returncode == 0, process.stderr
    (target,) = as_listed(checkout, NEW)["targets"]
    assert (target["module"], target["attribute"]) == ("trl.trainer.dpo_trainer", "DPOTrainer.training_step")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((ID,), "already"),
        (("Made-Up",), "lower-case words"),
        (("made_up",), "lower-case words"),
        ((NEW, "--severity", "bad"), "wrong-loss"),
        ((NEW, "--pull", "x"), "--pull"),
        ((NEW, "--pull", "0"), "--pull"),
        ((NEW, "--trl", ">>1"), "is not a range"),
        ((NEW, "--trl", ">=1.0"), "does not have TRL 0.11.4"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer.dpo_los"), "did you mean 'DPOTrainer.dpo_loss'?"),
        ((NEW, "--target", "trl.trainer.dpo_traner:DPOTrainer.dpo_loss"), "did you mean 'trl.trainer.dpo_trainer'?"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer"), "has no 'DPOTrainer' of its own"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer.gone_step"), "nor inherits it from transformers"),
        ((NEW, "--target", "transformers.trainer:Trainer.compute_loss"), "is not MODULE:FUNCTION"),
        ((NEW, "--target", "trl.trainer.dpo_trainer:DPOTrainer.a.b"), "is not MODULE:FUNCTION"),
        ((NEW, "--target", "trl.trainer.dpo_trainer"), "is not MODULE:FUNCTION"),
        ((NEW, "--wheel", "nowhere"), "is not a wheel of TRL"),
        ((NEW, "--title", "\x1b[31m"), "is not plain text"),
        ((NEW, "--title", "x" * 71), "--title has 71 characters, and 70 fit"),
    ],
)
def test_new_refuses_invalid_arguments_and_writes_nothing(
    checkout: Path, arguments: tuple[str, ...], expected: str
) -> None:
    before = everything(checkout)
    process = new(checkout, *arguments)
    assert (process.returncode, process.stdout) == (2, "")
    assert expected in " ".join(process.stderr.split())
    assert "Traceback" not in process.stderr
    assert everything(checkout) == before


@pytest.mark.parametrize("existing", ["trl_hotfix/patches/dpo_made_up_bug.py", "tests/proofs/dpo_made_up_bug.py"])
def test_new_does_not_overwrite_a_file(checkout: Path, existing: str) -> None:
    (checkout / existing).write_text("mine")
    before = everything(checkout)
    process = new(checkout, NEW)
    assert process.returncode == 2
    assert "is there already; nothing was written" in process.stderr
    assert everything(checkout) == before


def test_new_leaves_nothing_when_the_last_write_fails(checkout: Path) -> None:
    # The new manifest cannot replace the old one: the disk is full.
    before = everything(checkout)
    code = (
        "import sys; from pathlib import Path\nfrom trl_hotfix.commands.main import main\n"
        "def fails(self, *a): raise OSError(28, 'No space left on device', str(self))\n"
        f"Path.replace = fails; main(['new', {NEW!r}, '--target', {TARGET!r}])"
    )
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 2, process.stderr
    assert "No space left on device; nothing was written" in process.stderr
    assert everything(checkout) == before
    assert [path for path in checkout.rglob("*made_up*") if path.is_file()] == []


def test_new_outside_a_checkout_is_an_error(package: Path) -> None:
    process = run("new", NEW, "--target", TARGET, PYTHONPATH=str(package.parent))
    assert process.returncode == 2
    assert "is no checkout of trl_hotfix" in process.stderr
    assert "docs/packs.md" in process.stderr


def test_new_finds_the_target_in_the_named_release(checkout: Path, tmp_path: Path) -> None:
    release = tmp_path / "release"
    (release / "trl" / "trainer").mkdir(parents=True)
    (release / "trl" / "__init__.py").write_text("")
    (release / "trl" / "trainer" / "future.py").write_text("class Trainer:\n    def step(self):\n        return 1\n")
    (release / "trl-9.0.0.dist-info").mkdir()
    process = new(checkout, NEW, "--wheel", str(release), target="trl.trainer.future:Trainer.step")
    assert process.returncode == 0, process.stderr
    assert '"==9.0.0"' in process.stdout
    assert new(checkout, "another", "--wheel", str(release)).returncode == 2
