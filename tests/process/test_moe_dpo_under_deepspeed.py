"""The proof: a tiny Mixtral, the real DPOTrainer of TRL 0.11.4, a real DeepSpeed engine."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

import trl_hotfix
from trl_hotfix.model import Verdict
from trl_hotfix.patches.preference import moe_aux_loss_lost_under_deepspeed as patch

from launched import moe_dpo

ID = "moe-aux-loss-lost-under-deepspeed"
stages = pytest.mark.parametrize("stage", ["0", pytest.param("2", marks=pytest.mark.matrix)])


@cache
def run(*arguments: str, hotfix: str = "0") -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        result: dict[str, Any] = moe_dpo.train(Path(folder, "out.json"), *arguments, hotfix=hotfix)
    return result


@stages
def test_the_patch_restores_the_auxiliary_term(stage: str) -> None:
    unpatched = run("--deepspeed", stage)
    patched = run("--deepspeed", stage, hotfix="1")
    before, after = unpatched["steps"][0], patched["steps"][0]
    assert before["wrapped_as"] == after["wrapped_as"] == "DeepSpeedEngine"
    assert before["aux_loss"] == after["aux_loss"]
    assert after["loss"] - before["loss"] == pytest.approx(0.5 * after["aux_loss"], abs=1e-6)
    assert f"repaired: {ID}" in patched["stderr"]
    assert "trl_hotfix" not in unpatched["stderr"]


@stages
def test_patched_deepspeed_trains_as_one_process_does(stage: str) -> None:
    plain, patched, unpatched = run(), run("--deepspeed", stage, hotfix="1"), run("--deepspeed", stage)
    for step, expected in zip(patched["steps"], plain["steps"], strict=True):
        assert step["loss"] == pytest.approx(expected["loss"], abs=1e-6)
        assert step["router_gradient"] == pytest.approx(expected["router_gradient"], abs=1e-6)
        assert step["router_gradient"] > 0
    assert unpatched["steps"][0]["router_gradient"] < 0.01 * plain["steps"][0]["router_gradient"]


@pytest.mark.matrix
def test_the_evaluation_always_has_the_term() -> None:
    fixed_weights = ("--learning-rate", "0", "--steps", "1")
    plain = run(*fixed_weights)
    unpatched, patched = run(*fixed_weights, "--deepspeed", "0"), run(*fixed_weights, "--deepspeed", "0", hotfix="1")
    assert unpatched["eval_loss_after"] == patched["eval_loss_after"] == plain["eval_loss_before"]


@pytest.mark.matrix
def test_an_unaffected_model_trains_to_the_same_bits() -> None:
    unpatched, patched = run(), run(hotfix="1")
    assert {**patched, "stderr": ""} == {**unpatched, "stderr": ""}


def test_red_green_red_in_one_process_restores_vars() -> None:
    from trl.trainer import dpo_trainer

    before = dict(vars(dpo_trainer.DPOTrainer))
    assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(dpo_trainer).verdict is Verdict.REPRODUCED
    with trl_hotfix.patched(ID) as report:
        assert report[ID].state.value == "applied"
        assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(dpo_trainer).verdict is Verdict.FIXED
        assert vars(dpo_trainer.DPOTrainer)["get_batch_loss_metrics"] is not before["get_batch_loss_metrics"]
    assert patch.aux_loss_is_in_the_loss_of_a_wrapped_model(dpo_trainer).verdict is Verdict.REPRODUCED
    after = dict(vars(dpo_trainer.DPOTrainer))
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)


@pytest.mark.matrix
def test_distributed_data_parallel_no_longer_crashes() -> None:
    one_process = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with pytest.MonkeyPatch.context() as environment:
        for name, value in {**one_process, "MASTER_PORT": moe_dpo.free_port()}.items():
            environment.setenv(name, value)
        with pytest.raises(RuntimeError, match="'DistributedDataParallel' object has no attribute 'config'"):
            run.__wrapped__()
        patched = run.__wrapped__(hotfix="1")
    assert patched["steps"][0]["wrapped_as"] == "DistributedDataParallel"
    assert patched["steps"][0]["loss"] == pytest.approx(run()["steps"][0]["loss"], abs=1e-6)
