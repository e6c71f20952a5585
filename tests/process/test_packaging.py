"""The wheel owns the start-up hook: it works in every kind of install, and uninstalling removes it."""

from __future__ import annotations

import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tokenize
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from trl_hotfix.catalogue import condensed, evidence_file, loading, modules
from trl_hotfix.model import KnownBug, Patch

from helpers import sharing

if TYPE_CHECKING:
    from launched.environments import Environment

Build = Callable[..., dict[str, Path]]

CHECKOUT = Path(__file__).parents[2]
CATALOGUE = ("patches.json", "known.json")
EVIDENCE = ("fingerprints.json", "proven.json", "trainings.json")
FIRES = "import sys; print('trl_hotfix.autostart' in sys.modules)"


def test_the_wheel_has_the_hook_at_its_root(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        names = wheel.namelist()
        record = wheel.read(next(name for name in names if name.endswith("/RECORD"))).decode()
    outside = {name for name in names if not name.startswith(("trl_hotfix/", "trl_hotfix-"))}
    assert outside == {"trl_hotfix_autoapply.pth"}
    assert "trl_hotfix_autoapply.pth,sha256=" in record


def test_the_wheel_has_the_modules_and_data_of_the_package_and_nothing_else(
    distributions: dict[str, Path], checkout: Path
) -> None:
    files = {path.relative_to(checkout).as_posix(): path.read_bytes() for path in checkout.glob("trl_hotfix/**/*.py")}
    del files["trl_hotfix/data/build_hook.py"]
    others = ("py.typed", "data/defaults.json", "data/transformers.json", "relations.yaml")
    files |= {name: (checkout / name).read_bytes() for name in (f"trl_hotfix/{other}" for other in others)}
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        packed = {name: wheel.read(name) for name in wheel.namelist() if name.startswith("trl_hotfix/")}
    made = {f"trl_hotfix/data/{name}" for name in (*EVIDENCE, *CATALOGUE, "proofs.tar.bz2")}
    assert {name: content for name, content in packed.items() if name not in made} == files
    assert made < set(packed)


def test_the_wheel_has_what_the_evidence_says(distributions: dict[str, Path], checkout: Path) -> None:
    files = condensed.files(evidence_file.read_all(checkout / "evidence"))
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        assert {name: json.loads(wheel.read(f"trl_hotfix/data/{name}")) for name in EVIDENCE} == files


def test_the_wheel_has_the_catalogue(distributions: dict[str, Path]) -> None:
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        patches, known = (wheel.read(f"trl_hotfix/data/{name}") for name in CATALOGUE)
    assert msgspec.json.decode(patches, type=tuple[Patch, ...]) == loading.load()
    assert msgspec.json.decode(known, type=tuple[KnownBug, ...]) == loading.without_repair()


def test_a_mistake_in_the_catalogue_ends_the_build(build: Build, checkout: Path) -> None:
    patch = loading.load()[0]
    manifest = checkout / "patches.yaml"
    text = manifest.read_text(encoding="utf-8")
    manifest.write_text(text.replace(f"self_test: {patch.self_test}\n", f"self_test: {patch.self_test}x\n", 1))
    line = text[: text.index(f"self_test: {patch.self_test}\n")].count("\n") + 1
    with pytest.raises(subprocess.CalledProcessError) as caught:
        build(checkout, "--wheel")
    told = f"line {line}: self_test: .* has no function '{patch.self_test}x'; did you mean '{patch.self_test}'"
    assert re.search(told, caught.value.stdout.decode() + caught.value.stderr.decode())


def test_the_wheel_has_the_proofs_and_what_they_need(distributions: dict[str, Path], checkout: Path) -> None:
    tests = checkout / "tests"
    prove = checkout / "bench" / "proving" / "prove.py"
    paths = [*tests.glob("tiny/*.py")]
    paths += [
        tests / "proofs" / modules.family_of(patch.id) / f"{patch.id.replace('-', '_')}.py" for patch in loading.load()
    ]
    with zipfile.ZipFile(distributions["wheel"]) as wheel:
        content = io.BytesIO(wheel.read("trl_hotfix/data/proofs.tar.bz2"))
    with tarfile.open(fileobj=content) as archive:
        packed = {member.name: archive.extractfile(member).read() for member in archive}
    names = {path: path.relative_to(tests).as_posix() for path in paths} | {prove: "bench/proving/prove.py"}
    assert packed.keys() == {*names.values()}
    for path, name in names.items():
        text = packed[name].decode()
        # The same code on the same lines, and nothing else.
        assert code_of(text) == code_of(path.read_text(encoding="utf-8")), path
        assert not any(token.type == tokenize.COMMENT for token in tokenize.generate_tokens(io.StringIO(text).readline))


def code_of(text: str) -> list[Any]:
    """Return the code of a module without docstrings, and the line of each statement."""
    module = ast.parse(text)
    for node in ast.walk(module):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            node.body = [each for each in node.body if not _is_docstring(each)]
    lines = [node.lineno for node in ast.walk(module) if isinstance(node, ast.stmt)]
    return [ast.dump(module), lines]


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def test_the_wheel_is_small(distributions: dict[str, Path]) -> None:
    """A patch takes 4 KB: half of it is its module, and the rest its proof, its entry and its evidence.

    The relations take 50 KB, their ledger 5 of them, and the check of a script takes another 40.
    """
    assert distributions["wheel"].stat().st_size < 680_000 + 4_300 * len(loading.load())


def test_two_builds_are_the_same_files(build: Build, distributions: dict[str, Path], tmp_path: Path) -> None:
    """The second is made from another folder, with other times, modes and surroundings."""
    copy = tmp_path / "another folder" / "checkout"
    left_out = (".*", "build", "dist", "site", "__pycache__")
    shutil.copytree(CHECKOUT, copy, ignore=shutil.ignore_patterns(*left_out), copy_function=shutil.copyfile)
    shutil.copy(CHECKOUT / ".gitignore", copy)
    shutil.copytree(CHECKOUT / ".ci", copy / ".ci")
    for path in copy.rglob("*.py"):
        path.chmod(0o600)
    again = build(copy, TZ="Asia/Tokyo", LC_ALL="C", PYTHONHASHSEED="1")
    assert sorted(again) == ["sdist", "wheel"]
    for kind, path in distributions.items():
        assert again[kind].read_bytes() == path.read_bytes(), kind


def test_nothing_else_in_a_working_tree_gets_into_the_wheel(
    build: Build, distributions: dict[str, Path], checkout: Path
) -> None:
    for name in (
        "trl_hotfix/notes.md",
        "trl_hotfix/.DS_Store",
        "trl_hotfix/patches/__pycache__/engine.cpython-311.pyc",
        "trl_hotfix/patches/sft/sft_vlm_tools_dropped.py.orig",
        "trl_hotfix/data/trainings.json",
        "trl_hotfix/evidence/sft-vlm-tools-dropped.json",
        "tests/bench/scratch.py",
        "tests/proofs/sft/scratch.py",
        "tests/proofs/.ipynb_checkpoints/scratch.py",
        "tests/tiny/notes.md",
        "tests/tiny/__pycache__/scratch.cpython-311.pyc",
        "dist/trl_hotfix-0.1.0.tar.gz",
        "scratch.py",
    ):
        (checkout / name).parent.mkdir(exist_ok=True)
        (checkout / name).write_text("{}")
    wheel = build(checkout, "--wheel")["wheel"]
    assert wheel.read_bytes() == distributions["wheel"].read_bytes()


def test_the_sdist_builds_the_wheel_and_has_the_tests(distributions: dict[str, Path]) -> None:
    with tarfile.open(distributions["sdist"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "patches.yaml",
        "known.yaml",
        "trl_hotfix/trl_hotfix_autoapply.pth",
        "LICENSE",
        "tests/process/test_packaging.py",
    } <= names


def test_the_hook_is_one_short_line_without_exec() -> None:
    line = (Path(__file__).parents[2] / "trl_hotfix" / "trl_hotfix_autoapply.pth").read_text()
    assert line.count("\n") == 1
    assert len(line) < 130
    assert "exec" not in line


def test_pth_import_lines_still_run_in_this_python() -> None:
    # Python 3.18 ignores them silently (PEP 829): from then on a `.start` file is needed; before, it only costs time.
    assert sys.version_info < (3, 18)


INSTALLS = [(kind, installer) for kind in ("wheel", "sdist", "editable") for installer in ("pip", "uv")]


@pytest.mark.parametrize(("kind", "installer"), sharing.heavy(INSTALLS, smoke=[("wheel", "pip"), ("editable", "uv")]))
def test_every_install_fires_and_uninstalls_cleanly(
    kind: str, installer: str, bare: Environment, distributions: dict[str, Path], checkout: Path
) -> None:
    before = sorted(bare.packages.iterdir())
    requirements = ["-e", str(checkout)] if kind == "editable" else [str(distributions[kind])]
    bare.install(*requirements, installer=installer)
    assert bare.code(FIRES, TRL_HOTFIX="1").stdout == "True\n"
    assert bare.code(FIRES).stdout == "False\n"
    listed = bare.run("-m", "trl_hotfix", "--list")
    assert "moe-aux-loss-lost-under-deepspeed" in listed.stdout, listed.stderr
    assert "TRL_HOTFIX=1 works here" in listed.stdout
    assert "proven on 0." in listed.stdout
    bare.uninstall(installer)
    assert sorted(path for path in bare.packages.iterdir() if path.name != "__pycache__") == before


def test_the_list_reports_that_pip_target_cannot_work(
    bare: Environment, distributions: dict[str, Path], tmp_path: Path
) -> None:
    target = tmp_path / "target"
    bare.install("--target", str(target), str(distributions["wheel"]))
    listed = bare.run("-m", "trl_hotfix", "--list", PYTHONPATH=str(target), TRL_HOTFIX="1")
    assert "TRL_HOTFIX=1 does nothing here: trl_hotfix_autoapply.pth is in no site directory" in listed.stdout
