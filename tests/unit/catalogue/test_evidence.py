"""The evidence for a patch in words."""

from __future__ import annotations

import pytest
from helpers.patch_examples import PATCH
from msgspec.structs import replace

from trl_hotfix.catalogue import evidence


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
    monkeypatch.setattr(evidence, "proven", lambda: {PATCH.id: {"revision": revision, "releases": releases}})
    assert evidence.in_words(PATCH) == words


def test_proofs_are_sorted_by_release(monkeypatch: pytest.MonkeyPatch) -> None:
    proofs = [
        {"patch": PATCH.id, "revision": revision, "release": release, "stack": "tf4"}
        for revision, release in ((1, "0.11.10"), (1, "0.11.4"), (2, "0.11.0"))
    ]
    parity = [{"patch": PATCH.id}, {"patch": "another-patch"}]
    monkeypatch.setattr(evidence, "trainings", lambda: {"proofs": proofs, "parity": parity})
    assert [proof["release"] for proof in evidence.proofs_of(PATCH)] == ["0.11.4", "0.11.10"]
    assert evidence.proofs_of(replace(PATCH, id="another-patch")) == []
    assert evidence.parity_of(PATCH) == [{"patch": PATCH.id}]
