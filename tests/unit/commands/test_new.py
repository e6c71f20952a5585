"""``trl-hotfix new``: the three parts of a new patch in a checkout."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from trl_hotfix.catalogue import modules
from trl_hotfix.commands.new import Answer, with_entry

from helpers.command_line import CHECKOUT, ID, run

NEW = "dpo-made-up-bug"


@pytest.fixture
def checkout(package: Path) -> Path:
    """Copy what ``new`` looks for in a checkout; the package of the copy is the one that runs."""
    folder = package.parent
    for name in ("pyproject.toml", "patches.yaml", "known.yaml"):
        shutil.copy(CHECKOUT / name, folder)
    for family in modules.families():
        (folder / "tests" / "proofs" / family).mkdir(parents=True)
    shutil.copytree(CHECKOUT / "tests" / "tiny", folder / "tests" / "tiny")
    return folder


TARGET = "trl.trainer.dpo_trainer:DPOTrainer.dpo_loss"


def new(checkout: Path, *arguments: str, target: str = TARGET, **variables: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join(filter(None, [str(checkout), variables.pop("PYTHONPATH", "")]))
    return run("new", *arguments, "--target", target, PYTHONPATH=path, **variables)


def as_listed(checkout: Path, patch_id: str) -> dict[str, Any]:
    process = run("list", "--json", PYTHONPATH=str(checkout))
    # Its body is not proven yet, so it would stay off here.
    assert process.returncode == 1, process.stderr
    return next(patch for patch in json.loads(process.stdout)["patches"] if patch["id"] == patch_id)


def everything(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }


def added(before: bytes, after: bytes) -> list[str]:
    """Return the first lines of what ``after`` has more. All else is as before."""
    old, new = (text.decode().rstrip("\n").split("\n\n") for text in (before, after))
    assert [entry for entry in new if entry in old] == old
    return [entry.splitlines()[0] for entry in new if entry not in old]


def ids_of_families(manifest: str) -> dict[str, list[str]]:
    """Return the ids in each section of ``patches.yaml``, in its order."""
    _, *sections = re.split(r"(?m)^# (\w+): .*$", manifest)
    named = zip(sections[::2], sections[1::2], strict=True)
    return {name: re.findall(r"(?m)^- id: (\S+)", text) for name, text in named}


def test_each_section_of_the_catalogue_has_the_patches_of_a_family_by_id() -> None:
    manifest = (CHECKOUT / "patches.yaml").read_text(encoding="utf-8")
    of_families = ids_of_families(manifest)
    assert sorted(of_families) == modules.families()
    assert sum(map(len, of_families.values())) == manifest.count("\n- id: ")
    for family, ids in of_families.items():
        assert ids == sorted(ids)
        assert {modules.family_of(patch_id) for patch_id in ids} == {family}


@pytest.mark.parametrize("patch_id", ["aaa", "dpo-made-up", "zzz"])
@pytest.mark.parametrize("family", ["sft", "dpo", "beneath"])
def test_an_entry_goes_into_its_family_by_its_id(family: str, patch_id: str) -> None:
    manifest = (CHECKOUT / "patches.yaml").read_text(encoding="utf-8")
    longer = with_entry(manifest, f"- id: {patch_id}\n  revision: 1\n", patch_id, family)
    before, after = ids_of_families(manifest), ids_of_families(longer)
    assert {name: ids for name, ids in after.items() if name != family} == {
        name: ids for name, ids in before.items() if name != family
    }
    assert after[family] == sorted([*before[family], patch_id])
    assert added(manifest.encode(), longer.encode()) == [f"- id: {patch_id}"]


def test_new_writes_an_entry_a_module_tests_and_a_proof(checkout: Path) -> None:
    before = everything(checkout)
    process = new(checkout, NEW, "--pull", "1234", "--title", 'The "loss": wrong by 2')
    assert process.returncode == 0, process.stderr
    after = everything(checkout)
    module, proof = "trl_hotfix/patches/dpo/dpo_made_up_bug.py", "tests/proofs/dpo/dpo_made_up_bug.py"
    tests = "tests/patches/dpo/test_dpo_made_up_bug.py"
    assert set(after) - set(before) == {module, tests, proof}
    assert [name for name in before if before[name] != after[name]] == ["patches.yaml"]
    assert added(before["patches.yaml"], after["patches.yaml"]) == [f"- id: {NEW}"]
    assert ids_of_families(after["patches.yaml"].decode())["dpo"].count(NEW) == 1
    listed = as_listed(checkout, NEW)
    assert (listed["id"], listed["title"], listed["severity"]) == (NEW, 'The "loss": wrong by 2', "wrong-loss")
    assert (listed["trl"], listed["review_by"], listed["upstream"]["fix"]) == ("==0.11.4", None, 1234)
    assert (listed["state"], listed["revision"]) == ("skipped", 1)
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
        command = [*ruff, *check, "--config", str(CHECKOUT / "pyproject.toml"), module, tests, proof]
        style = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
        assert style.returncode == 0, style.stdout
    steps = ("trl-hotfix verify", "says `proven`", "make patches", "-m bench run", "trl-hotfix scan", "make evidence")
    for order, next_step in enumerate(steps, 1):
        assert f"  {order}. " in process.stdout
        assert next_step in process.stdout


def test_a_new_patch_of_a_constructor_is_called_in_constructions(checkout: Path) -> None:
    new(checkout, NEW, target="trl.trainer.dpo_trainer:DPOTrainer.__init__")
    assert [target["called"] for target in as_listed(checkout, NEW)["targets"]] == ["construction"]


def test_the_proof_of_a_new_patch_is_not_implemented(checkout: Path) -> None:
    new(checkout, NEW)
    code = "import dpo_made_up_bug as proof\nfor function in (proof.train, proof.unaffected):\n    try: function()\n"
    code += "    except NotImplementedError as error: print(str(error)[:21])\n"
    folders = [CHECKOUT, checkout / "tests", checkout / "tests" / "proofs" / "dpo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))}
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert process.stdout == "write the proof first\n" * 2, process.stderr


def test_new_prints_what_it_wrote_as_json(checkout: Path) -> None:
    process = new(checkout, NEW, "--json")
    answer = msgspec.json.decode(process.stdout.encode(), type=Answer, strict=True)
    assert all((checkout / answer[part]).is_file() for part in ("manifest", "module", "tests", "proof"))
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
        ((NEW, "--family", "ppo"), "'sft'"),
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


@pytest.mark.parametrize("folder", ["trl_hotfix/patches/dpo", "tests/proofs/dpo"])
def test_new_does_not_overwrite_a_file(checkout: Path, folder: str) -> None:
    (checkout / folder / "dpo_made_up_bug.py").write_text("mine")
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
    wheel, target = ("--wheel", str(release)), "trl.trainer.future:Trainer.step"
    without = new(checkout, NEW, *wheel, target=target)
    assert "no patch has a target in trl.trainer.future: name the --family, adapters, beneath" in without.stderr
    process = new(checkout, NEW, *wheel, "--family", "online", target=target)
    assert process.returncode == 0, process.stderr
    assert '"==9.0.0"' in process.stdout
    assert new(checkout, "another", *wheel).returncode == 2
