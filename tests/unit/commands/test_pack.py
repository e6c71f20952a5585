"""``trl-hotfix pack fingerprints``: what is proved on the installed TRL goes into the file of the pack's project."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from trl.trainer import reward_trainer

from trl_hotfix.catalogue import loading, packs
from trl_hotfix.commands import pack, pack_file
from trl_hotfix.commands.main import main
from trl_hotfix.matching import digests, fingerprints, sources
from trl_hotfix.matching.fingerprints import Bodies

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "acme-trl-fixes"
ID, TARGET = "reward-accuracy-counts-ties", "trl.trainer.reward_trainer:compute_accuracy"
BODY = digests.loaded(reward_trainer.compute_accuracy).digest or ""
FOUND = pack_file.Found(ID, TARGET, BODY, None)
INHERITED = pack_file.Found(ID, TARGET, BODY, "transformers:Trainer.training_step")
OLD = {"releases": ["0.10.1"], "targets": {TARGET: {"c1:old": {"releases": ["0.10.1"], "is": {ID: "buggy"}}}}}


def forget() -> None:
    """Clear what this process has cached of packs."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_fixes"]:
        del sys.modules[name]
    for cache in (packs.find, loading.of_pack, fingerprints._of_pack):
        cache.cache_clear()


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The example of the docs without its fingerprints, installed from this project."""
    project, site = tmp_path / "project", tmp_path / "site"
    shutil.copytree(EXAMPLE, project)
    (project / "acme_fixes" / "fingerprints.json").unlink()
    shutil.copytree(project / "acme_fixes", site / "acme_fixes")
    info = site / "acme_trl_fixes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-trl-fixes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{packs.GROUP}]\nacme = acme_fixes\n")
    names = (path.relative_to(site) for path in site.rglob("*") if path.is_file())
    (info / "RECORD").write_text("".join(f"{name},,\n" for name in names))
    monkeypatch.syspath_prepend(str(site))
    forget()
    yield project
    forget()


@pytest.fixture
def verdict(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What ``verify`` says, without a process of its own."""
    cell: dict[str, Any] = {"verdict": "proven", "why": "", "bodies": {TARGET: BODY}}
    more = {"patch": f"acme/{ID}", "revision": 1, "trl": "0.11.4", "leaves": {}}
    monkeypatch.setattr(pack, "verified", lambda ids, names, folder: [{**more, **cell}])
    return cell


def run(project: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["pack", "fingerprints", "acme", "--project", str(project), *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def file(project: Path) -> Path:
    return project / "acme_fixes" / "fingerprints.json"


@pytest.mark.parametrize("before", [None, OLD])
def test_the_bodies_of_this_release_are_added_once(
    project: Path, verdict: dict[str, Any], before: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if before is not None:
        file(project).write_text(json.dumps(before))
    assert run(project) == 0
    written = file(project).read_bytes()
    bodies = pack_file.read(file(project))
    assert bodies.verdict(ID, TARGET, BODY) == "buggy"
    assert bodies.verdict(ID, TARGET, "c1:old") == (None if before is None else "buggy")
    assert bodies.releases == (("0.11.4",) if before is None else ("0.10.1", "0.11.4"))
    shown = capsys.readouterr().out
    assert f"acme/{ID}: {TARGET} {BODY}, TRL 0.11.4: added\nwrote {file(project)}" in shown
    changed = file(project).stat().st_mtime_ns
    assert run(project) == 0
    assert (file(project).read_bytes(), file(project).stat().st_mtime_ns) == (written, changed)
    assert "TRL 0.11.4: there already\nnothing new for" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["not-reproduced", "unrepaired", "error", "uncovered"])
def test_what_the_self_test_does_not_prove_is_refused_unless_it_is_named(
    project: Path, verdict: dict[str, Any], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    verdict |= {"verdict": word, "why": "in range, but the self-test says fixed"}
    assert run(project) == 1
    assert not file(project).exists()
    assert capsys.readouterr().err == f"acme/{ID}: refused, {word}: in range, but the self-test says fixed\n"
    assert run(project, "--unproven", ID) == 0
    assert pack_file.read(file(project)).verdict(ID, TARGET, BODY) == "buggy"


def test_without_a_body_nothing_can_be_written(project: Path, verdict: dict[str, Any]) -> None:
    verdict |= {"verdict": "error", "why": "ImportError", "bodies": {}}
    assert run(project, "--unproven", f"acme/{ID}") == 1
    assert not file(project).exists()


def test_a_patch_of_other_releases_has_nothing_to_write(
    project: Path, verdict: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    verdict["verdict"] = "absent"
    assert run(project, "--json") == 0
    printed = capsys.readouterr().out
    answer: Any = msgspec.json.decode(printed.encode(), type=pack.Answer, strict=True)
    assert answer == json.loads(printed)
    assert (answer["not_here"], answer["fingerprints"], answer["refused"]) == ([f"acme/{ID}"], [], [])
    assert not file(project).exists()


def test_two_bodies_of_one_release_are_a_contradiction(
    project: Path, verdict: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    text = json.dumps(OLD).replace("0.10.1", "0.11.4")
    file(project).write_text(text)
    assert run(project) == 1
    assert file(project).read_text() == text
    assert f"has body {BODY} here, and the file has c1:old for TRL 0.11.4" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"acme_fixes/patches.yaml": "# edited\n"}, "patches.yaml is not what acme-trl-fixes==1.0 has installed"),
        ({"acme_fixes/patches/reward_accuracy_counts_ties.py": ""}, "install the pack again"),
        ({"acme_fixes/fingerprints.json": "{"}, "cannot be used: "),
        ({"acme_fixes/fingerprints.json": '{"releases": ["new"], "targets": {}}'}, "'new' is not a version of TRL"),
        ({"acme_fixes/fingerprints.json": '{"releases": 1}'}, "mend it, or delete it"),
    ],
)
def test_a_project_that_is_not_the_installed_pack_is_one_error(
    project: Path, verdict: dict[str, Any], change: dict[str, str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in change.items():
        (project / name).write_text(text)
    assert run(project) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") <= 1


def test_another_folder_a_wrong_id_and_a_wrong_pack_are_usage_errors(
    project: Path, verdict: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path) == 2
    assert f"{tmp_path} has no acme_fixes/patches.yaml" in capsys.readouterr().err
    assert run(project, "--unproven", ID[:-1]) == 2
    assert f"did you mean 'acme/{ID}'?" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["pack", "fingerprints", "amce"])
    assert "no pack 'amce' is installed" in capsys.readouterr().err


def test_a_project_with_a_src_folder_is_found(project: Path, verdict: dict[str, Any]) -> None:
    (project / "src").mkdir()
    (project / "acme_fixes").rename(project / "src" / "acme_fixes")
    assert run(project) == 0
    assert (project / "src" / "acme_fixes" / "fingerprints.json").is_file()


def test_a_failed_write_leaves_the_earlier_file(
    project: Path, verdict: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file(project).write_text(json.dumps(OLD))

    def full(self: Path, target: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    assert run(project) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert json.loads(file(project).read_text()) == OLD
    assert not list(file(project).parent.glob(".*"))


def test_what_is_inherited_has_a_section_of_its_own(tmp_path: Path) -> None:
    after = pack_file.merged(Bodies((), {}), "1.9.0", [INHERITED])
    pack_file.write(tmp_path / "fingerprints.json", pack_file.merged(after, "1.10.0", [INHERITED]))
    bodies = pack_file.read(tmp_path / "fingerprints.json")
    assert (bodies.targets, bodies.releases_with(TARGET, BODY)) == ({}, ("1.9.0", "1.10.0"))
    assert bodies.verdict(ID, TARGET, BODY) == "buggy"
    assert bodies.inherits(TARGET, "1.9.0") == INHERITED.of


def test_the_example_is_for_the_installed_trl() -> None:
    files = sources.installed()
    assert files is not None
    bodies = pack_file.read(EXAMPLE / "acme_fixes" / "fingerprints.json")
    assert bodies.at(TARGET, files.version) == files.body(*TARGET.split(":")) == BODY
    assert pack_file.merged(bodies, files.version, [FOUND]) == bodies


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(click.ClickException, match="cannot be written"):
        pack_file.write(tmp_path / "none" / "fingerprints.json", Bodies((), {}))
