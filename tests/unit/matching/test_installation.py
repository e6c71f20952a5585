"""Whether the metadata of TRL are those of the code that is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import installation, versions

from helpers.command_line import CHECKOUT, without_trl
from helpers.patch_examples import patch

METADATA = "Metadata-Version: 2.1\nName: trl\nVersion: {}\n"
LITERAL = '__version__ = "{}"\n'
FROM_METADATA = "from importlib.metadata import version\n__version__ = version('trl')\n"

Lay = Callable[..., Path]


@pytest.fixture
def lay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Lay]:
    """Make files in a folder, and put the folder in front of the path. No TRL is imported yet."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if f"{name}.".startswith("trl.")}

    def make(name: str, files: dict[str, str], on_path: str = "") -> Path:
        folder = tmp_path / name
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        sys.path.insert(0, str(folder / on_path))
        return folder

    yield make
    sys.modules.pop("trl", None)
    sys.modules.update(real)


def info(version: str) -> dict[str, str]:
    return {f"trl-{version}.dist-info/METADATA": METADATA.format(version)}


def test_the_trl_that_the_tests_run_on_is_the_one_of_its_metadata() -> None:
    assert installation.mismatch() is None
    assert installation.problems(loading.load()) == []


def test_another_folder_of_another_version_is_a_mismatch(lay: Lay) -> None:
    described = lay("site", {**info("0.11.4"), "trl/__init__.py": LITERAL.format("0.11.4")})
    taken = lay("other", {"trl/__init__.py": LITERAL.format("0.9.6")})
    assert installation.mismatch() == (
        f"`import trl` takes {taken / 'trl'} of version 0.9.6, but the version 0.11.4 comes from {described / 'trl'}"
    )


@pytest.mark.parametrize(
    "files",
    [
        {"trl/__init__.py": LITERAL.format("0.11.4")},
        {"trl/__init__.py": "__version__: str = '0.11.4'"},
        {"trl/__init__.py": FROM_METADATA, "VERSION": "0.11.4\n"},
        {"trl/__init__.py": FROM_METADATA, "trl/VERSION": "0.11.4\n"},
        {"trl/__init__.py": FROM_METADATA, **info("0.11.4")},
        {"trl/notes.txt": "a folder of that name, which is no package"},
    ],
    ids=["literal", "annotated", "VERSION above", "VERSION", "metadata beside it", "no package"],
)
def test_another_folder_of_the_same_version_is_accepted(lay: Lay, files: dict[str, str]) -> None:
    lay("site", {**info("0.11.4"), "trl/__init__.py": LITERAL.format("0.11.4")})
    lay("other", files)
    assert installation.mismatch() is None


@pytest.mark.parametrize("files", [{"VERSION": "0.9.6\n"}, {"VERSION": "what is this"}, {}])
def test_another_folder_is_a_mismatch_even_if_it_asks_for_the_metadata(lay: Lay, files: dict[str, str]) -> None:
    """Since its ``__version__`` would be that of the metadata, nothing of the code that is imported tells."""
    lay("site", {**info("1.16.0"), "trl/__init__.py": FROM_METADATA})
    taken = lay("other", {"trl/__init__.py": FROM_METADATA, **files})
    assert f"takes {taken / 'trl'}" in str(installation.mismatch())


@pytest.mark.parametrize(
    ("version", "of_code", "fits"),
    [("1.17.0.dev0", "1.17.0.dev0", True), ("1.17.0.dev0", "0.9.6", False), ("1.17.0.dev0", None, True)],
)
@pytest.mark.parametrize("named", [True, False])
def test_the_checkout_of_an_editable_install_has_its_own_version(
    lay: Lay, version: str, of_code: str | None, fits: bool, named: bool
) -> None:
    code = {"src/VERSION": of_code} if of_code is not None else {}
    checkout = lay("a checkout", {"src/trl/__init__.py": FROM_METADATA, **code}, "src")
    url = {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    lay("site", {**info(version), f"trl-{version}.dist-info/direct_url.json": json.dumps(url if named else {})})
    if not named:
        fits = of_code == version
    assert (installation.mismatch() is None) is fits


def test_a_checkout_with_its_metadata_inside_is_accepted(lay: Lay) -> None:
    files = {"trl.egg-info/PKG-INFO": METADATA.format("0.12.0.dev0"), "trl/__init__.py": FROM_METADATA}
    lay("checkout", files)
    assert installation.mismatch() is None


@pytest.mark.parametrize(("of_code", "fits"), [("0.11.4", True), ("0.9.6", False)])
@pytest.mark.parametrize("metadata_inside", [True, False])
def test_a_zip_file_has_a_version_too(
    lay: Lay, tmp_path: Path, of_code: str, fits: bool, metadata_inside: bool
) -> None:
    lay("site", {**info("0.11.4"), "trl/__init__.py": ""})
    archive = tmp_path / "trl.zip"
    with zipfile.ZipFile(archive, "w") as packed:
        packed.writestr("trl/__init__.py", LITERAL.format(of_code))
        for path, text in info(of_code).items() if metadata_inside else ():
            packed.writestr(path, text)
    sys.path.insert(0, str(archive))
    assert (installation.mismatch() is None) is (fits or metadata_inside)


def test_the_imported_package_decides_and_not_the_path(lay: Lay) -> None:
    old = lay("old", {"trl/__init__.py": LITERAL.format("0.9.6"), **info("0.9.6")})
    __import__("trl")
    assert installation.mismatch() is None
    lay("new", {"trl/__init__.py": LITERAL.format("0.11.4"), **info("0.11.4")})
    assert f"takes {old / 'trl'} of version 0.9.6, but the version 0.11.4" in str(installation.mismatch())
    sys.modules["trl"] = ModuleType("trl")
    assert installation.mismatch() is None


def test_a_finder_that_raises_is_no_mismatch(lay: Lay, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
            raise RuntimeError(name)

    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    assert installation.mismatch() is None


# Too old


def test_the_oldest_release_is_the_lower_bound_of_all_ranges() -> None:
    assert str(installation.oldest_release(loading.load())) == next(iter(versions.SUPPORTED)).version
    assert str(installation.oldest_release([patch(trl=">=1.2,<2"), patch(trl="==1.1.*")])) == "1.1"
    assert installation.oldest_release([patch(trl=">=1.2"), patch(trl="<2")]) is None
    assert installation.oldest_release([]) is None


@pytest.mark.parametrize(
    ("trl", "is_too_old"),
    [("0.8.6", True), ("0.9.5", True), ("0.9.6", False), ("0.9.6.dev0", False), ("0.9.4.dev0", True), ("99", False)],
)
def test_a_release_before_all_ranges_is_a_problem(trl: str, is_too_old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "installed", lambda name: trl)
    problems = installation.problems(loading.load())
    assert [problem.split(":")[0] for problem in problems] == (
        [f"TRL {trl} is older than all releases that the catalogue covers, 0.9.6 and later"] if is_too_old else []
    )


# What apply() makes of it

APPLY = "import trl_hotfix; report = trl_hotfix.apply(); print(report.ok)"
STRICTLY = "import trl_hotfix; trl_hotfix.apply(strict=True); print('went on')"
IMPORTED = "import trl_hotfix.autostart; trl_hotfix.autostart.start(); import trl; print('went on')"


def in_process(code: str, *folders: Path | str, **variables: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("TRL_HOTFIX")}
    path = os.pathsep.join(map(str, (*folders, CHECKOUT)))
    environment = {**kept, "PYTHONPATH": path, **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["too old", "mismatch"])
def test_a_trl_that_cannot_be_judged_is_a_warning_and_an_error_under_strict(tmp_path: Path, kind: str) -> None:
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text(LITERAL.format("0.8.6" if kind == "too old" else "0.9.6"))
    expected = f"`import trl` takes {tmp_path / 'trl'} of version 0.9.6, but the version 0.11.4 comes from"
    if kind == "too old":
        without_trl(tmp_path, "0.8.6")
        expected = "TRL 0.8.6 is older than all releases that the catalogue covers, 0.9.6 and later"
    lenient = in_process(APPLY, tmp_path)
    assert lenient.stdout == "True\n", lenient.stderr
    assert lenient.stderr.count("WARNING") == lenient.stderr.count(f"trl_hotfix: WARNING: {expected}") == 1
    for code, variables in ((STRICTLY, {}), (IMPORTED, {"TRL_HOTFIX": "strict"})):
        strict = in_process(code, tmp_path, **variables)
        assert (strict.returncode, strict.stdout) == (1, "")
        assert "NotAppliedError: strict mode" in strict.stderr
        assert f"  {expected}" in strict.stderr


def test_who_asks_for_no_patch_is_not_warned(tmp_path: Path) -> None:
    folder = without_trl(tmp_path, "0.8.6")
    process = in_process("import trl_hotfix; trl_hotfix.apply(only=[], strict=True)", folder)
    assert (process.returncode, process.stderr) == (0, "")
    process = in_process(APPLY, folder, TRL_HOTFIX="0")
    assert process.stderr.count("WARNING") == 1
    assert "turns apply() off" in process.stderr


def test_without_trl_nothing_is_said(tmp_path: Path) -> None:
    assert "older than" not in in_process(STRICTLY, without_trl(tmp_path, None)).stderr
