"""What a process will decide from the bodies of TRL's methods, read from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trl_hotfix.catalogue import loading
from trl_hotfix.matching import fingerprints, foreseen, gates, sources, versions
from trl_hotfix.matching.fingerprints import Bodies
from trl_hotfix.matching.sources import Release
from trl_hotfix.model import Reason, State, Target

from helpers.patch_examples import having, patch

OURS = "import transformers\n\nclass DPOTrainer(transformers.Trainer):\n    def step(self): return 1\n"
NAME = "trl.trainer.dpo_trainer:DPOTrainer.step"
PATCH = patch()


@pytest.fixture
def release(tmp_path: Path) -> Release:
    """A TRL 0.11.4 that has one class with one method."""
    (tmp_path / "trl-0.11.4.dist-info").mkdir()
    module = tmp_path / "trl" / "trainer" / "dpo_trainer.py"
    module.parent.mkdir(parents=True)
    module.write_text(OURS)
    return Release(tmp_path)


def on_record(monkeypatch: pytest.MonkeyPatch, **verdicts: str) -> None:
    """Have each body on record, with the verdict of the patch."""
    targets: Any = {NAME: {body: {"releases": ["0.11.3"], "is": {PATCH.id: is_}} for body, is_ in verdicts.items()}}
    monkeypatch.setattr(fingerprints, "bodies", lambda: Bodies(("0.11.3",), targets))


def reason(release: Release | None, trl: str = "0.11.4", *, tried: bool = False, **changes: Any) -> Reason | None:
    decision = foreseen.refused(patch(**changes), having(trl=trl), release, try_unknown_body=tried)
    assert decision is None or decision.state is State.SKIPPED
    return decision.reason if decision is not None else None


def body(release: Release) -> str:
    digest = release.body("trl.trainer.dpo_trainer", "DPOTrainer.step")
    assert digest is not None
    return digest


@pytest.mark.parametrize(
    ("verdict", "expected"), [("buggy", None), ("fixed", Reason.ALREADY_FIXED), ("absent", Reason.ALREADY_FIXED)]
)
def test_the_verdict_on_the_body_decides(
    release: Release, monkeypatch: pytest.MonkeyPatch, verdict: str, expected: Reason | None
) -> None:
    on_record(monkeypatch, **{body(release): verdict})
    assert reason(release) is expected
    assert reason(release, tried=True) is expected


def test_an_unknown_body_is_refused_unless_it_is_to_be_tried(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    on_record(monkeypatch, **{"c1:another": "buggy"})
    assert reason(release) is Reason.UNKNOWN_BODY
    assert reason(release, tried=True) is None
    decision = foreseen.refused(PATCH, having(trl="0.11.4"), release, try_unknown_body=False)
    assert decision is not None
    assert decision.evidence == {"target": NAME, "body": body(release)}


def test_a_fork_out_of_the_range_is_judged_by_its_bodies(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    on_record(monkeypatch, **{body(release): "buggy"})
    assert reason(release, "0.13.0.dev0") is None
    on_record(monkeypatch, **{"c1:another": "buggy"})
    assert reason(release, "0.13.0.dev0") is Reason.TRL_VERSION


def test_a_target_that_is_gone_is_named(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    on_record(monkeypatch, **{body(release): "buggy"})
    gone = (Target("trl.trainer.gone", "DPOTrainer.step", "wrapper"),)
    assert reason(release, targets=gone) is Reason.MISSING_TARGET


def test_without_files_a_release_that_is_not_on_record_cannot_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    on_record(monkeypatch, **{"c1:another": "buggy"})
    assert reason(None) is None
    assert reason(None, "0.11.3") is None


def test_without_any_proven_body_no_file_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    on_record(monkeypatch)
    assert reason(None) is Reason.UNKNOWN_BODY
    assert reason(None, tried=True) is None


def test_our_own_patches_all_pass_on_the_installed_release() -> None:
    files = sources.installed()
    here = [each for each in loading.load() if gates.applicability(each).state is State.PENDING]
    assert here
    for each in here:
        assert foreseen.refused(each, versions.installed, files, try_unknown_body=False) is None
