"""The proof: a tiny Mixtral, the real DPOTrainer of TRL 0.11.4, a real DeepSpeed engine."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.model import Verdict
from trl_hotfix.patches import moe_aux_loss_lost_under_deepspeed as patch

_spec = importlib.util.spec_from_file_location("moe_dpo", Path(__file__).with_name("moe_dpo.py"))
assert _spec is not None
assert _spec.loader is not None
moe_dpo = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(moe_dpo)

ID = "moe-aux-loss-lost-under-deepspeed"


@cache
def run(*arguments: str, hotfix: str = "0") -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        result: dict[str, Any] = moe_dpo.train(Path(folder, "out.json"), *arguments, hotfix=hotfix)
    return result


@pytest.mark.parametrize("stage", ["0", "2"])
def test_under_deepspeed_the_patch_puts_back_the_coefficient_times_the_aux_loss(stage: str) -> None:
    unpatched = run("--deepspeed", stage)
    patched = run("--deepspeed", stage, hotfix="1")
    before, after = unpatched["steps"][0], patched["steps"][0]
    assert before["wrapped_as"] == after["wrapped_as"] == "DeepSpeedEngine"
    assert before["aux_loss"] == after["aux_loss"]
    assert after["loss"] - before["loss"] == pytest.approx(0.5 * after["aux_loss"], abs=1e-6)
    assert f"applied {ID}" in patched["stderr"]
    assert "trl_hotfix" not in unpatched["stderr"]


@pytest.mark.parametrize("stage", ["0", "2"])
def test_patched_deepspeed_trains_as_one_process_without_deepspeed_does(stage: str) -> None:
    right, patched, unpatched = run(), run("--deepspeed", stage, hotfix="1"), run("--deepspeed", stage)
    for ours, theirs in zip(patched["steps"], right["steps"], strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6)
        assert ours["router_gradient"] == pytest.approx(theirs["router_gradient"], abs=1e-6)
        assert ours["router_gradient"] > 0
    assert unpatched["steps"][0]["router_gradient"] < 0.01 * right["steps"][0]["router_gradient"]


def test_evaluation_is_unchanged_and_has_the_term_with_and_without_the_patch() -> None:
    still = ("--learning-rate", "0", "--steps", "1")
    plain = run(*still)
    unpatched, patched = run(*still, "--deepspeed", "0"), run(*still, "--deepspeed", "0", hotfix="1")
    assert unpatched["eval_loss_after"] == patched["eval_loss_after"] == plain["eval_loss_before"]


def test_a_model_that_the_bug_does_not_hit_trains_to_the_same_bits() -> None:
    unpatched, patched = run(), run(hotfix="1")
    assert {**patched, "stderr": ""} == {**unpatched, "stderr": ""}


def test_red_green_red_in_one_process_and_vars_are_as_before() -> None:
    import trl.trainer.dpo_trainer as leaf

    before = dict(vars(leaf.DPOTrainer))
    assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(leaf).verdict is Verdict.REPRODUCED
    with trl_hotfix.patched(ID) as report:
        assert report[ID].state.value == "applied"
        assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(leaf).verdict is Verdict.FIXED
        assert vars(leaf.DPOTrainer)["get_batch_loss_metrics"] is not before["get_batch_loss_metrics"]
    assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(leaf).verdict is Verdict.REPRODUCED
    after = dict(vars(leaf.DPOTrainer))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


def test_distributed_data_parallel_does_not_crash_any_more() -> None:
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**one_process, "MASTER_PORT": moe_dpo.free_port()}.items():
            environment.setenv(name, value)
        with pytest.raises(RuntimeError, match="'DistributedDataParallel' object has no attribute 'config'"):
            run.__wrapped__()
        patched = run.__wrapped__(hotfix="1")
    assert patched["steps"][0]["wrapped_as"] == "DistributedDataParallel"
    assert patched["steps"][0]["loss"] == pytest.approx(run()["steps"][0]["loss"], abs=1e-6)
