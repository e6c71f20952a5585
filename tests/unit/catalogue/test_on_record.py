"""The evidence for a patch in words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from trl_hotfix.catalogue import on_record

from helpers.patch_examples import PATCH


@pytest.mark.parametrize(
    ("revision", "releases", "words"),
    [
        (1, ["0.11.0", "0.11.1", "0.11.4"], "proven on 0.11.0 ... 0.11.4 (3 releases)"),
        (1, ["0.11.4"], "proven on 0.11.4"),
        (1, [], "not proven yet"),
        (2, ["0.11.4"], "not proven yet"),
    ],
)
def test_only_evidence_of_this_revision_counts(
    revision: int, releases: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_record, "proven", lambda: {PATCH.id: {"revision": revision, "releases": releases}})
    assert on_record.in_words(PATCH) == words


def test_proofs_are_sorted_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = [{"release": release, "stack": "tf4"} for release in ("0.11.10", "0.11.4")]
    record = {"revision": PATCH.revision, "proofs": proofs, "parity": [{"release": "0.11.4"}]}
    monkeypatch.setattr(on_record, "trainings", lambda patch_id: record)
    assert [proof["release"] for proof in on_record.proofs_of(PATCH)] == ["0.11.4", "0.11.10"]
    assert on_record.proofs_of(replace(PATCH, revision=PATCH.revision + 1)) == []
    assert on_record.parity_of(PATCH) == [{"release": "0.11.4"}]


def test_a_patch_without_evidence_has_no_proofs() -> None:
    unknown = replace(PATCH, id="another-patch")
    assert on_record.proofs_of(unknown) == []
    assert on_record.parity_of(unknown) == []
