"""A pack is built as a wheel, installed beside trl_hotfix, and used on the real TRL."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from launched.environments import Environment

ID = "acme/marks-loss"
OTHER = "dpo-f-divergence-ignored"
"""The patch of our own with the same target, so that the function is TRL's own without the pack."""

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "acme-trl-fixes"
version = "1.2"

[project.entry-points."trl_hotfix.packs"]
acme = "acme_fixes"

[tool.hatch.build.targets.wheel]
packages = ["acme_fixes"]
"""
PACK = Path(__file__).parents[1] / "acme_fixes"
PATCHES = (PACK / "patches.yaml").read_text()
MODULE = (PACK / "patches" / "marks_loss.py").read_text()
WORKERS = """\
import json, multiprocessing, pickle, sys

def work(data):
    import trl_hotfix
    from trl import DPOTrainer
    loss = pickle.loads(data) if data else vars(DPOTrainer)["dpo_loss"]
    report = trl_hotfix.status()
    on = [entry.id for entry in report if entry.state.value == "applied"]
    return report.digest, "acme/marks-loss" in on, "acme_fixes" in sys.modules

if __name__ == "__main__":
    from trl import DPOTrainer
    import trl_hotfix
    if sys.argv[1:]:
        trl_hotfix.apply(packs=sys.argv[1:], unknown_body="try", only=["acme/marks-loss"])
    data = pickle.dumps(vars(DPOTrainer)["dpo_loss"]) if sys.argv[1:] else None
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(json.dumps([work(None), *pool.map(work, [data])]))
"""

HALVES = "acme/halves-loss"
FOUR_PATCHES = PATCHES.replace("marks-loss", "halves-loss").replace("wrapper: mark", "wrapper: halve")
FOUR_MODULE = """\
import math

from trl_hotfix.authoring import judge
from trl_hotfix.model import Outcome, Verdict
from trl_hotfix.testing import default_arguments, single_process, stub_trainer


def halve(wrapped, instance, args, kwargs):
    losses, *rewards = wrapped(*args, **kwargs)
    return (losses / 2, *rewards)


def is_marked(leaf):
    import torch

    if not hasattr(leaf, "DPOTrainer"):
        return Outcome(Verdict.ABSENT)
    with single_process(leaf):
        trainer = stub_trainer(leaf.DPOTrainer, default_arguments(leaf.DPOConfig))
        losses, *_ = trainer.dpo_loss(*[torch.zeros(1)] * 4)
    return judge(losses.item(), right=math.log(2) / 2, wrong=math.log(2))
"""
"""A pack whose wrapper takes wrapt's four arguments."""


CALL_PATCHES = FOUR_PATCHES.replace("halves-loss", "halves-loss-by-call")
CALL_MODULE = FOUR_MODULE.replace("def halve(wrapped, instance, args, kwargs):", "@wrapper\ndef halve(call: Call):")
for old, new in {
    "wrapped(*args, **kwargs)": "call.with_(policy_chosen_logps=call['policy_chosen_logps'])()",
    "import judge": "import Call, judge, wrapper",
    "default_arguments, single_process, stub_trainer": "default_arguments, stub_trainer",
    "    with single_process(leaf):\n        trainer": "    trainer",
    "        losses, *_ =": "    losses, *_ =",
}.items():
    assert old in CALL_MODULE
    CALL_MODULE = CALL_MODULE.replace(old, new)


def wheel(folder: Path, fingerprints: str | None = None, patches: str = PATCHES, **modules: str) -> Path:
    """Build the wheel of the project as ``python -m build`` does; hatchling alone needs no network."""
    files = {"pyproject.toml": PROJECT, "acme_fixes/patches.yaml": patches}
    files |= {"acme_fixes/__init__.py": "", "acme_fixes/patches/__init__.py": ""}
    files |= {f"acme_fixes/patches/{name}.py": text for name, text in (modules or {"marks_loss": MODULE}).items()}
    if fingerprints is not None:
        files["acme_fixes/fingerprints.json"] = fingerprints
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-t", "wheel"], cwd=folder, check=True)
    (built,) = (folder / "dist").glob("*.whl")
    return built


@pytest.fixture
def with_pack(own: Environment, tmp_path: Path) -> Environment:
    """Return an environment with trl_hotfix and the pack, whose fingerprints are made as docs/packs.md describes."""
    own.install(str(wheel(tmp_path / "first")))
    verified = own.run("-m", "trl_hotfix", "verify", "--packs", "acme", "--json", ID)
    (cell,) = json.loads(verified.stdout)["cells"]
    assert (cell["patch"], cell["revision"], cell["verdict"]) == (ID, 3, "proven"), verified.stderr
    targets = {
        target: {body: {"releases": [cell["trl"]], "is": {"marks-loss": "buggy"}}}
        for target, body in cell["bodies"].items()
    }
    fingerprints = json.dumps({"releases": [cell["trl"]], "targets": targets})
    own.install("--reinstall", str(wheel(tmp_path / "second", fingerprints)))
    return own


def test_an_installed_pack_is_used_only_where_it_is_named(with_pack: Environment, tmp_path: Path) -> None:
    code = (
        "import sys; from trl import DPOTrainer; import trl_hotfix; print(vars(DPOTrainer)['dpo_loss'].__module__,"
        "'acme_fixes' in sys.modules)"
    )
    assert with_pack.code(code, TRL_HOTFIX="1", TRL_HOTFIX_SKIP=OTHER).stdout == "trl.trainer.dpo_trainer False\n"
    full = {"TRL_HOTFIX_LOG": "full"}
    named = with_pack.code(code, TRL_HOTFIX="1", TRL_HOTFIX_SKIP=OTHER, TRL_HOTFIX_PACKS="acme", **full)
    assert named.stdout == "trl_hotfix.patching.pickled True\n", named.stderr
    assert f"trl_hotfix: DEBUG: repair of {ID} is on (bug: " in named.stderr

    misspelled = with_pack.code(code, TRL_HOTFIX="1", TRL_HOTFIX_SKIP=OTHER, TRL_HOTFIX_PACKS="amce")
    assert (misspelled.returncode, misspelled.stdout) == (2, "")
    assert misspelled.stderr.count("trl_hotfix: ERROR") == 1
    assert "no pack 'amce' is installed (there is: acme); did you mean 'acme'?" in misspelled.stderr
    assert "Traceback" not in misspelled.stderr

    assert ID not in with_pack.run("-m", "trl_hotfix", "--list").stdout
    listed = with_pack.run("-m", "trl_hotfix", "--list", "--packs", "acme")
    assert (listed.returncode, ID in listed.stdout) == (0, True), listed.stderr
    assert "of acme-trl-fixes==1.2" in listed.stdout
    wrong = with_pack.run("-m", "trl_hotfix", "--packs", "amce", "--list")
    assert (wrong.returncode, wrong.stdout) == (2, "")

    # The variable reaches a worker; a name in the script alone does not, and the worker logs that.
    script = tmp_path / "script.py"
    script.write_text(WORKERS)
    process = with_pack.run(str(script), TRL_HOTFIX="1", TRL_HOTFIX_SKIP=OTHER, TRL_HOTFIX_PACKS="acme")
    parent, worker = json.loads(process.stdout)
    assert parent == worker == [parent[0], True, True], process.stderr
    process = with_pack.run(str(script), "acme")
    parent, worker = json.loads(process.stdout)
    assert (parent[1:], worker[1:]) == ([True, True], [False, False]), process.stderr
    assert f"a pickle asks for {ID}, revision 3; here it is not known" in process.stderr
    assert "name its pack in TRL_HOTFIX_PACKS if you trust it: acme" in process.stderr


def test_a_pack_with_wrapts_four_arguments_is_applied_without_a_warning(own: Environment, tmp_path: Path) -> None:
    own.install(str(wheel(tmp_path / "pack", patches=FOUR_PATCHES, halves_loss=FOUR_MODULE)))
    code = (
        "import trl.trainer.dpo_trainer; import trl_hotfix; status = trl_hotfix.status()['acme/halves-loss']\n"
        "(evidence,) = status.evidence.values()\n"
        "print(status.state.value, *(round(evidence[run]['measured'], 4) for run in ('red', 'green')))"
    )
    process = own.code(
        code,
        TRL_HOTFIX="1",
        TRL_HOTFIX_PACKS="acme",
        TRL_HOTFIX_ONLY=HALVES,
        TRL_HOTFIX_UNKNOWN_BODY="try",
        PYTHONWARNINGS="always",
    )
    assert process.stdout == "applied 0.6931 0.3466\n", process.stderr
    (line,) = (line for line in process.stderr.splitlines() if "trl_hotfix" in line or "acme" in line)
    assert line.startswith("trl_hotfix: INFO: 1 repair on for DPO, digest ")


def test_wrappers_of_both_forms_are_red_green_and_red(own: Environment, tmp_path: Path) -> None:
    modules = {"halves_loss": FOUR_MODULE, "halves_loss_by_call": CALL_MODULE}
    own.install(str(wheel(tmp_path / "pack", patches=FOUR_PATCHES + CALL_PATCHES, **modules)))
    verified = own.run("-m", "trl_hotfix", "verify", "--packs", "acme", "--json", HALVES, f"{HALVES}-by-call")
    cells = {cell["patch"]: cell for cell in json.loads(verified.stdout)["cells"]}
    assert cells.keys() == {HALVES, f"{HALVES}-by-call"}, verified.stderr
    for cell in cells.values():
        (runs,) = cell["leaves"].values()
        assert cell["verdict"] == "proven"
        assert [runs[run]["verdict"] for run in ("red", "green", "red again")] == ["reproduced", "fixed", "reproduced"]


EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "acme-trl-fixes"
TIES = "acme/reward-accuracy-counts-ties"
WALK = f"""\
import json, numpy, trl_hotfix
from trl.trainer import reward_trainer

def accuracy():
    rewards = numpy.array([[2.0, 1.0], [1.0, 1.0], [1.0, 1.0], [1.0, 3.0]])
    return reward_trainer.compute_accuracy((rewards, numpy.zeros(4)))["accuracy"]

before, original = accuracy(), reward_trainer.compute_accuracy
status = trl_hotfix.apply(packs=["acme"])[{TIES!r}]
repaired = accuracy()
trl_hotfix.revert({TIES!r})
(evidence,) = status.evidence.values()
verdicts = [evidence[run]["verdict"] for run in ("red", "green")]
after = reward_trainer.compute_accuracy is original
print(json.dumps([before, status.state.value, verdicts, repaired, accuracy(), after]))
"""


def test_the_pack_of_the_docs_is_proved_listed_applied_and_reverted(own: Environment, tmp_path: Path) -> None:
    project = tmp_path / "acme-trl-fixes"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("__pycache__"))
    file = project / "acme_fixes" / "fingerprints.json"
    published = json.loads(file.read_text())
    file.unlink()
    hotfix = str(own.folder / "bin" / "trl-hotfix")

    def install() -> None:
        own.install("--reinstall", "--no-build-isolation", "--offline", str(project))

    def listed() -> tuple[int, str]:
        process = own.run(hotfix, "list", "--packs", "acme", "--json")
        states = {patch["id"]: patch["state"] for patch in json.loads(process.stdout)["patches"]}
        return process.returncode, states[TIES]

    install()
    assert listed() == (1, "skipped")
    written = own.run(hotfix, "pack", "fingerprints", "acme", cwd=project)
    assert (written.returncode, ": added\nwrote " in written.stdout) == (0, True), written.stderr
    (target,) = published["targets"]
    assert json.loads(file.read_text())["targets"][target].keys() == published["targets"][target].keys()
    assert "nothing new for" in own.run(hotfix, "pack", "fingerprints", "acme", cwd=project).stdout
    install()
    assert listed() == (0, "pending")

    process = own.code(WALK)
    ends = [0.75, "applied", ["reproduced", "fixed"], 0.5, 0.75, True]
    assert json.loads(process.stdout.splitlines()[-1]) == ends, process.stderr
    (cell,) = json.loads(own.run(hotfix, "verify", "--packs", "acme", "--json", TIES).stdout)["cells"]
    assert cell["verdict"] == "proven"
    script = tmp_path / "train.py"
    script.write_text("from trl import RewardTrainer\nRewardTrainer(model=model)\n")
    scanned = own.run(hotfix, "scan", "--packs", "acme", "--json", str(script))
    assert TIES in scanned.stdout, scanned.stderr
    assert TIES not in own.run(hotfix, "scan", "--json", str(script)).stdout
    assert own.run(hotfix, "pack", "fingerprints", "amce", cwd=project).returncode == 2
