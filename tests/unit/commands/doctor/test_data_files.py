"""The data files of the package: what is in them, and what is reported if one cannot be read."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from trl_hotfix.catalogue import evidence_file, loading, on_record
from trl_hotfix.commands.doctor import data_files
from trl_hotfix.commands.doctor.answer import Problems
from trl_hotfix.commands.doctor.data_files import counted_files
from trl_hotfix.matching import fingerprints


def test_the_files_are_counted_and_have_digests() -> None:
    problems = Problems()
    files, patches = counted_files(None, problems)
    assert (problems.entries, patches) == ([], loading.load())
    assert {name: file["count"] for name, file in files.items()} == {
        "patches": len(loading.load()),
        "known": len(loading.without_repair()),
        "fingerprints": len(fingerprints.bodies().releases),
        "proven": sum(len(proven["releases"]) for proven in on_record.proven().values()),
        "evidence": sum(len(on_record.trainings(patch.id)["proofs"]) for patch in patches),
    }
    for file in files.values():
        path = Path(file["path"])
        contents = [path] if path.is_file() else evidence_file.paths(path)
        assert file["sha256"] == hashlib.sha256(b"".join(path.read_bytes() for path in contents)).hexdigest()


def test_a_file_that_cannot_be_read_is_a_problem_and_the_others_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(data_files, "manifest", lambda: tmp_path / "patches.yaml")
    problems = Problems()
    files, _ = counted_files(None, problems)
    assert problems.entries == [
        {
            "problem": f"{tmp_path / 'patches.yaml'} cannot be read: No such file or directory",
            "remedy": "install trl_hotfix again",
        }
    ]
    assert [name for name, file in files.items() if file["sha256"] is None] == ["patches"]


def test_an_unknown_pack_leaves_our_own_patches() -> None:
    problems = Problems()
    _, patches = counted_files("nobodys", problems)
    assert patches == loading.load()
    (entry,) = problems.entries
    assert "no pack 'nobodys' is installed" in entry["problem"]
    assert entry["remedy"] == "correct the name, or leave the pack out"
