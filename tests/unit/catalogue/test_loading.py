"""The shipped catalogue, and a file that cannot be read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from trl_hotfix.catalogue import data_files, loading, modules
from trl_hotfix.commands.new import LONGEST_TITLE
from trl_hotfix.errors import CatalogueError, DamagedError
from trl_hotfix.matching import gates, versions
from trl_hotfix.matching.fingerprints import bodies
from trl_hotfix.model import Bug, Patch

from helpers.example_entry import SHIPPED


def test_the_shipped_catalogue_loads() -> None:
    assert SHIPPED
    assert all(isinstance(patch, Patch) for patch in SHIPPED)


def test_the_shipped_catalogue_is_read_once() -> None:
    assert loading.load() is loading.load()


@pytest.mark.parametrize("bug", [*SHIPPED, *loading.without_repair()], ids=lambda bug: bug.id)
def test_a_title_reads_right_after_bug_in_a_line_of_the_log(bug: Bug) -> None:
    assert len(bug.title) <= LONGEST_TITLE, f"{len(bug.title)} characters: {bug.title}"
    assert not bug.title.endswith(".")
    assert bug.title.isprintable()


def test_no_two_bugs_have_one_title() -> None:
    titles = Counter(bug.title.lower() for bug in (*SHIPPED, *loading.without_repair()))
    assert [title for title, count in titles.items() if count > 1] == []


def test_a_bug_beneath_trl_says_whose_it_is() -> None:
    beneath = [patch for patch in SHIPPED if modules.family_of(patch.id) == "beneath"]
    assert beneath
    assert [patch.id for patch in beneath if patch.layer is None] == []


@pytest.mark.parametrize("bug", [*SHIPPED, *loading.without_repair()], ids=lambda bug: bug.id)
def test_a_shipped_bug_says_whether_to_train_again(bug: Bug) -> None:
    assert bug.harm is not None
    assert bug.retrain is not None
    assert len(bug.retrain) <= 200
    assert bug.retrain.split()[0].rstrip(".,:;") in ("No", "Yes", "Only", "Perhaps")


def test_the_shipped_bugs_without_a_repair_are_in_some_release_and_end_where_they_are_fixed() -> None:
    for bug in loading.without_repair():
        releases = [trl for trl in bodies().releases if gates.has_bug(trl, bug)]
        assert releases, bug.id
        fixed_in = bug.upstream.fixed_in
        assert fixed_in is None or (fixed_in in bodies().releases and not gates.has_bug(fixed_in, bug)), bug.id
        assert any(any(versions.in_range(trl, hit.trl or "") for trl in releases) for hit in bug.hits), bug.id


# An installed package


@pytest.fixture
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package as a wheel has it, which the functions read."""
    monkeypatch.setattr(data_files, "PACKAGE", package)
    return package


def test_an_installed_package_has_the_catalogue_of_the_checkout(installed: Path) -> None:
    assert data_files.manifest() == installed / "data" / "patches.json"
    assert data_files.known_bugs_file() == installed / "data" / "known.json"
    assert loading.load.__wrapped__() == SHIPPED
    assert loading.without_repair.__wrapped__() == loading.without_repair()


def test_yaml_in_an_installed_package_is_not_read(installed: Path) -> None:
    for folder in (installed, installed / "data", installed.parent):
        for name in ("patches.yaml", "known.yaml"):
            (folder / name).write_text("- id: [")
    assert loading.load.__wrapped__() == SHIPPED
    assert loading.without_repair.__wrapped__() == loading.without_repair()


@pytest.mark.parametrize("content", [None, b"", b"{}", b'[{"id": "x"}]', b"[" * 100_000, b"\xff"])
def test_a_damaged_catalogue_of_an_installed_package_is_one_error(content: bytes | None, installed: Path) -> None:
    for name, read in {"patches.json": loading.load, "known.json": loading.without_repair}.items():
        path = installed / "data" / name
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DamagedError, match="install trl_hotfix again") as caught:
            read.__wrapped__()
        assert str(path) in str(caught.value)


def test_reading_an_installed_catalogue_imports_no_patch_and_no_parser_of_yaml(package: Path) -> None:
    code = (
        "import sys, trl_hotfix\nfrom trl_hotfix.catalogue import loading\n"
        "trl_hotfix.apply(); loading.without_repair()\n"
        "print(trl_hotfix.__file__, [name for name in sys.modules if name.startswith('trl_hotfix.patches.')],"
        " [name for name in ('yaml', 'click', 'rich', 'torch', 'trl') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(package.parent)}
    process = subprocess.run([sys.executable, "-c", code], env=environment, cwd=package, capture_output=True, text=True)
    assert process.stdout == f"{package / '__init__.py'} [] []\n", process.stderr


def test_patches_are_read_without_the_bugs_that_have_no_repair(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise AssertionError("known.yaml is read")

    monkeypatch.setattr(loading, "known_bugs_file", refuse)
    assert loading.load.__wrapped__() == SHIPPED
    assert loading.known([]) == SHIPPED
    with pytest.raises(AssertionError, match="is read"):
        loading.without_repair.__wrapped__()


@pytest.mark.parametrize("content", [None, b"\xff\xfe\xff"], ids=["missing", "not UTF-8"])
def test_an_unreadable_file_is_a_mistake(
    content: bytes | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "patches.yaml"
    if content is not None:
        path.write_bytes(content)
    monkeypatch.setattr(loading, "manifest", lambda: path)
    with pytest.raises(CatalogueError, match="cannot be read") as caught:
        loading.load.__wrapped__()
    assert caught.value.path == str(path)
