"""A patch is applied as a whole, or refused and rolled back."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.made_up_patches import identity, is_marked, mark, pass_through, raises
from trl.trainer.dpo_trainer import DPOTrainer

import trl_hotfix
from trl_hotfix.model import Outcome, Reason, State, Verdict

pytestmark = pytest.mark.usefixtures("dpo_trainer_unchanged")


@pytest.mark.parametrize(
    ("self_test", "wrapper", "attribute", "expected"),
    [
        (is_marked, pass_through, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST)),
        (raises, mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (lambda module: "yes", mark, "DPOTrainer.dpo_loss", (State.FAILED, Reason.SELF_TEST_ERROR)),
        (is_marked, mark, "DPOTrainer.gone", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "GoneTrainer.dpo_loss", (State.SKIPPED, Reason.MISSING_TARGET)),
        (is_marked, mark, "DPOTrainer.dpo_loss DPOTrainer._tag_names", (State.FAILED, Reason.INSTALL_ERROR)),
        (lambda module: Outcome(Verdict.FIXED), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
        (lambda module: Outcome(Verdict.ABSENT), mark, "DPOTrainer.dpo_loss", (State.SKIPPED, Reason.NOT_REPRODUCED)),
    ],
)
def test_a_refused_patch_is_rolled_back(
    declare: Any,
    caplog: pytest.LogCaptureFixture,
    self_test: Any,
    wrapper: Any,
    attribute: str,
    expected: tuple[State, Reason],
) -> None:
    declare(self_test, wrapper, attribute=attribute)
    before = dict(vars(DPOTrainer))
    report = trl_hotfix.apply()
    assert identity(report) == expected
    assert report["made-up"].evidence
    assert not report.ok
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert dict(vars(DPOTrainer)) == before

    trl_hotfix.revert()
    with pytest.raises(trl_hotfix.NotAppliedError, match=f"made-up.*{expected[1].value}"):
        trl_hotfix.apply(strict=True)
    assert dict(vars(DPOTrainer)) == before


@pytest.mark.parametrize("step", range(6))
def test_a_failed_installation_changes_nothing(declare: Any, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Three targets need three look-ups of a site and three assignments; each of the six fails once."""
    from trl_hotfix.patching import sites

    declare(is_marked, mark, attribute="DPOTrainer.dpo_loss DPOTrainer.get_batch_loss_metrics DPOTrainer.compute_loss")
    calls = iter(range(100))

    def failing(function: Any) -> Any:
        def fail_once(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == step:
                raise MemoryError("in the middle")
            return function(*args, **kwargs)

        return fail_once

    before = dict(vars(DPOTrainer))
    monkeypatch.setattr(sites.Sites, "at", failing(sites.Sites.at))
    monkeypatch.setattr(sites.Site, "put_on", failing(sites.Site.put_on))
    assert identity(trl_hotfix.apply()) == (State.FAILED, Reason.INSTALL_ERROR)
    after = dict(vars(DPOTrainer))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
