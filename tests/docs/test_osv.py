"""The feed of OSV records says of each release what the catalogue says."""

from __future__ import annotations

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import gates
from trl_hotfix.matching.fingerprints import bodies

from tools import osv

PATCHES = (*loading.load(), *loading.without_repair())
RELEASES = list(bodies().releases)


@pytest.mark.parametrize("patch", PATCHES, ids=[patch.id for patch in PATCHES])
def test_the_ranges_have_the_releases_with_the_bug_and_no_other(patch: object) -> None:
    content = osv.record(patch, "2026-01-01T00:00:00Z")  # type: ignore[arg-type]
    (affected,) = content["affected"]
    (only,) = affected["ranges"]
    in_range, is_open = [], False
    steps = {trl: kind for event in only["events"] for kind, trl in event.items()}
    for trl in RELEASES:
        is_open = {"introduced": True, "fixed": False}.get(steps.get(trl, ""), is_open)
        in_range += [trl] if is_open else []
    expected = [trl for trl in RELEASES if gates.has_bug(trl, patch)]  # type: ignore[arg-type]
    assert in_range == affected["versions"] == expected != []


def test_each_bug_has_a_record() -> None:
    records = osv.feed("2026-01-01T00:00:00Z")
    assert list(records) == [f"x_trl_hotfix-{patch.id}" for patch in PATCHES]
    assert all(content["id"] == name for name, content in records.items())
    dapo = records["x_trl_hotfix-grpo-dapo-normaliser"]
    assert dapo["references"][0] == {"type": "REPORT", "url": "https://github.com/huggingface/trl/issues/5619"}
    assert dapo["database_specific"]["kind"] == "wrong-gradient"
    unrepaired = records["x_trl_hotfix-dpo-evaluate-precomputes-with-trained-policy"]
    assert unrepaired["database_specific"] == {"kind": "wrong-metric", "repair": "none"}
    assert unrepaired["details"].endswith("Repair by trl_hotfix: none (known, no repair here; fixed in TRL 1.9.0)")
