"""The gates of a patch, up to the first one that it does not pass."""

from __future__ import annotations

from msgspec.structs import astuple, replace

from trl_hotfix.matching import inherited, sources
from trl_hotfix.reporting.trail import trail

from helpers.patch_examples import PATCH, having, selection_of

INHERITING = replace(PATCH, targets=(replace(PATCH.targets[0], attribute="DPOTrainer.training_step"),))


def test_without_trl_the_trail_ends_there() -> None:
    steps = trail(PATCH, selection_of(), None, having())
    assert [(step.gate, step.passed) for step in steps] == [("selection", True), ("TRL", False)]


def test_a_patch_out_of_range_has_no_body_step() -> None:
    steps = trail(PATCH, selection_of(), None, having(trl="1.0.0"))
    assert astuple(steps[-1]) == ("TRL", "1.0.0, the range is >=0.11.0,<0.12.0", False)


def test_an_unmet_requirement_is_a_failed_step() -> None:
    steps = trail(replace(PATCH, requires={"deepspeed": ">=0.14.5"}), selection_of(), None, having(trl="0.11.4"))
    assert [(step.gate, step.passed) for step in steps[1:]] == [("TRL", True), ("deepspeed", False)]
    assert astuple(steps[-1]) == ("deepspeed", "not installed, required is >=0.14.5", False)


def test_without_sources_the_body_cannot_be_told() -> None:
    steps = trail(PATCH, selection_of(skip=["some-patch"]), None, having(trl="0.11.4"))
    assert astuple(steps[0]) == ("selection", "left out by skip= or TRL_HOTFIX_SKIP", False)
    assert (steps[-1].gate, steps[-1].passed) == ("body of trl.trainer.dpo_trainer: DPOTrainer.step", None)


def test_an_inherited_body_is_that_of_the_installed_transformers() -> None:
    body = inherited.body_of("transformers:Trainer.training_step", "5.5.1")
    (*_, step) = trail(INHERITING, selection_of(), sources.installed(), having(trl="0.11.4", transformers="5.5.1"))
    assert step.passed is False
    assert step.observation.startswith(f"{body}, inherited from transformers 5.5.1: the self-test has not run on it")


def test_a_transformers_that_is_not_on_record_is_looked_at_later() -> None:
    (*_, step) = trail(INHERITING, selection_of(), sources.installed(), having(trl="0.11.4", transformers="5.2.7"))
    assert step.passed is None
    assert step.observation == "inherited, and not on record for transformers 5.2.7: we read it at its import"
