"""The bodies on record are those of the real wheels, and the ranges are facts about them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import digests, fingerprints, gates
from trl_hotfix.matching.inherited import bodies_of
from trl_hotfix.matching.sources import Release

from bench.releases import layout
from bench.results import evidence

CHECKOUT = Path(__file__).parents[2]
PATCHES = loading.load()


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_the_evidence_agrees_with_the_wheels_and_with_its_cells(sources: None, patch: loading.Patch) -> None:
    recorded = (evidence.EVIDENCE / f"{patch.id}.json").read_text(encoding="utf-8")
    assert evidence.dumped(patch, evidence.load(patch.id)) == recorded
    assert "/.bench/" not in recorded, "an error names a folder of one machine"


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)
def test_exactly_releases_with_buggy_bodies_are_in_range(patch: loading.Patch) -> None:
    bodies = fingerprints.bodies()
    cells = evidence.load(patch.id)["cells"]
    for release in layout.releases():
        in_range = gates.targets_for(patch, release)
        inside = {target.name for target in in_range}
        for target in patch.targets:
            inherited = bodies.inherits(target.name, release)
            if inherited is not None:
                # Which of these bodies it is depends on the transformers beside this release.
                verdicts = {bodies.verdict(patch.id, target.name, body) for body in bodies_of(inherited)}
                assert "buggy" in verdicts or target.name not in inside, (release, target.name)
                continue
            buggy = bodies.verdict(patch.id, target.name, bodies.at(target.name, release)) == "buggy"
            if buggy and target.name not in inside:
                # A body with the bug may do no harm where something else around it is another, or where another target
                # of this module repairs it.
                leaves = [cell["leaves"].get(target.module) for cell in cells if cell["release"] == release]
                expected = {"absent"} | ({"reproduced"} if target.module in {one.module for one in in_range} else set())
                assert {leaf["red"]["verdict"] for leaf in leaves if leaf} <= expected, (release, target.name)
            else:
                assert buggy == (target.name in inside), (release, target.name)


def pythons() -> list[str]:
    """Return the interpreters of this machine, one for each minor version."""
    command = [sys.executable, "-m", "uv", "python", "list", "--only-installed", "--output-format", "json"]
    process = subprocess.run(command, capture_output=True, text=True, check=True)
    paths = {
        (interpreter["version_parts"]["minor"]): interpreter["path"] for interpreter in json.loads(process.stdout)[::-1]
    }
    return [path for minor, path in sorted(paths.items()) if minor >= 10]


def test_every_python_reads_the_same_bodies(sources: None, tmp_path: Path) -> None:
    script = tmp_path / "digests.py"
    script.write_text(
        dedent(
            """
            import ast, json, sys
            sys.path.insert(0, sys.argv[1])
            from trl_hotfix.matching.digests import digest
            from pathlib import Path
            digests = {}
            for file in sorted(Path(sys.argv[2], "trl").rglob("*.py")):
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                        digests[f"{file}:{node.lineno}"] = digest(node)
            print(json.dumps(digests))
            """
        )
    )
    interpreters = pythons()
    assert interpreters
    for release in ("0.11.4", layout.releases()[-1]):
        read = [
            subprocess.run(
                [python, str(script), str(CHECKOUT), str(layout.BENCH / "overlay" / release)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for python in interpreters
        ]
        assert len(json.loads(read[0])) > 300
        assert len(set(read)) == 1, interpreters


def test_comments_and_layout_are_not_part_of_a_body() -> None:
    import ast

    def body(text: str) -> str:
        (definition,) = ast.parse(dedent(text)).body
        assert isinstance(definition, ast.FunctionDef)
        return digests.digest(definition)

    plain = body("def f(x): return x + 1")
    assert body('def f(x):\n    """Doc."""\n    # why\n    return (x\n        + 1)\n') == plain
    assert body("def f(x): return x + 2") != plain
    assert body("def f(y): return y + 1") != plain
    assert body("def f(x): return x + 1.0") != plain
    assert body("def f(x): return None") != body("def f(x): return False")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trl_hotfix", "fingerprint", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=CHECKOUT / "tests", check=False)


def altered(release: str, tmp_path: Path, version: str, old: str, new: str) -> Path:
    """Return a copy of a release with another version and one change in the DPO trainer."""
    import shutil

    copy = tmp_path / "altered"
    shutil.copytree(layout.BENCH / "overlay" / release / "trl", copy / "trl")
    (copy / f"trl-{version}.dist-info").mkdir()
    file = copy / "trl" / "trainer" / "dpo_trainer.py"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    return copy


def test_the_command_compares_a_new_wheel(sources: None, tmp_path: Path) -> None:
    unchanged = run("--wheel", str(layout.BENCH / "overlay" / "0.11.4"))
    assert unchanged.returncode == 0, unchanged.stderr
    assert "matches" in unchanged.stdout

    changed = altered("0.11.4", tmp_path, "0.11.5", "router_aux_loss_coef", "router_aux_loss_coefficient")
    process = run("--wheel", str(changed))
    assert process.returncode == 1, process.stderr
    assert "unknown body" in process.stdout

    newest = run("--wheel", str(layout.BENCH / "overlay" / layout.releases()[-1]), "--json")
    targets = {target["target"]: target for target in json.loads(newest.stdout)["targets"]}
    removed = targets["trl.trainer.dpo_trainer:DPOTrainer.get_batch_loss_metrics"]
    assert (removed["says"], removed["body"], removed["in_range"]) == ("gone", None, False)


def test_the_command_reads_a_wheel_file(sources: None, tmp_path: Path) -> None:
    import zipfile

    overlay = layout.BENCH / "overlay" / "0.11.4"
    wheel = tmp_path / "trl-0.11.4-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for file in [*overlay.glob("trl/trainer/*.py"), *overlay.glob("trl-*.dist-info/METADATA")]:
            archive.write(file, file.relative_to(overlay))
    body = Release(wheel).body("trl.trainer.dpo_trainer", "DPOTrainer.get_batch_loss_metrics")
    assert body == fingerprints.bodies().at("trl.trainer.dpo_trainer:DPOTrainer.get_batch_loss_metrics", "0.11.4")
    assert "matches" in run("--wheel", str(wheel)).stdout


@pytest.mark.parametrize("content", [b"", b"not a zip"])
def test_a_path_without_trl_is_one_clear_error(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "trl-9.whl"
    file.write_bytes(content)
    for path in (file, tmp_path / "nowhere.whl", tmp_path):
        process = run("--wheel", str(path))
        assert process.returncode == 2
        assert "Traceback" not in process.stderr
        assert str(path) in process.stderr


def test_inherited_and_imported_functions_are_followed(sources: None) -> None:
    release = Release(layout.BENCH / "overlay" / "0.22.0")
    assert release.body("trl.trainer.sft_trainer", "prepare_peft_model") == release.body(
        "trl.models.utils", "prepare_peft_model"
    )
    assert release.body("trl.trainer.xpo_trainer", "XPOTrainer._generate") is not None
    assert release.body("trl.trainer.sft_trainer", "gone") is None
    assert release.body("trl.trainer.gone", "gone") is None
