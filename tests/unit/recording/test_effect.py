"""What a repair changed in the first step: measured, recorded, shown, and without a trace in the run."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from trl_hotfix import api
from trl_hotfix.commands import status
from trl_hotfix.errors import SettingError
from trl_hotfix.model import Called, Severity
from trl_hotfix.recording import effect, ranks
from trl_hotfix.recording.trackers import FILE
from trl_hotfix.reporting.effects import Effect

from helpers.command_line import runner
from helpers.trl_like import NAME, double, doubles

OWN_LOSS = "MadeUpTrainer.own_loss"
DOUBLED = {
    "step": 1,
    "loss": 2.0,
    "loss_without": 1.0,
    "gradient_norm": 2.0,
    "gradient_norm_without": 1.0,
    "cosine": 1.0,
}


@pytest.fixture
def doubled(declare: Any, trl_like: Any) -> Any:
    """The made-up module; its patch doubles the loss of a step."""
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, called={OWN_LOSS: Called.STEP})
    return trl_like


def record_of(folder: Path) -> Any:
    return json.loads((folder / FILE).read_text(encoding="utf-8"))["patches"][0]


def trained(trl_like: Any, folder: Path, cls: Any = None, **settings: Any) -> Any:
    trainer = trl_like.trainer(folder, cls, **settings)
    trainer.train()
    return trainer


def test_the_record_has_the_step_with_the_repair_and_without(doubled: Any, tmp_path: Path) -> None:
    api.apply(measure_effect=True)
    trainer = trained(doubled, tmp_path)
    entry = record_of(tmp_path)
    assert entry["effect"] == DOUBLED
    # What was computed again is not counted.
    assert (entry["called"], entry["acted"]) == (2, 2)
    assert "training_step" not in vars(trainer)


def test_all_micro_batches_of_the_step_count(doubled: Any, tmp_path: Path) -> None:
    api.apply(measure_effect=True)
    trained(doubled, tmp_path, gradient_accumulation_steps=2)
    assert record_of(tmp_path)["effect"] == DOUBLED
    assert record_of(tmp_path)["called"] == 4


def test_nobody_measures_unless_asked(doubled: Any, tmp_path: Path) -> None:
    api.apply(strict=True)
    trained(doubled, tmp_path)
    assert "effect" not in record_of(tmp_path)


@pytest.mark.parametrize(("value", "measures"), [("1", True), ("on", True), ("0", False), ("", False)])
def test_the_variable_asks(
    value: str, measures: bool, doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRL_HOTFIX_EFFECT", value)
    api.apply(strict=True)
    trained(doubled, tmp_path)
    assert ("effect" in record_of(tmp_path)) is measures


def test_a_wrong_value_is_refused(fresh_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_HOTFIX_EFFECT", "maybe")
    with pytest.raises(SettingError, match=r"TRL_HOTFIX_EFFECT='maybe' is not understood\. Expected one of 1, true"):
        api.apply()


def test_what_measures_nothing_is_refused(fresh_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingError, match="observe repairs nothing"):
        api.apply(measure_effect=True, observe=True)
    monkeypatch.setenv("TRL_HOTFIX_CALLBACK", "0")
    with pytest.raises(SettingError, match="leaves out the callback that measures the effect"):
        api.apply(measure_effect=True)


def test_the_log_and_status_say_it(doubled: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trl_hotfix")
    api.apply(measure_effect=True)
    trained(doubled, tmp_path)
    line = "without it, step 1 has loss 1 instead of 2, and gradient norm 1 instead of 2 (0.5 times), cosine 1.000000"
    fields = {record.getMessage(): getattr(record, "trl_hotfix", None) for record in caplog.records}
    assert fields[f"made-up: {line}"] == {"event": "effect", "patch": "made-up", **DOUBLED}
    shown = runner().invoke(status.command, [str(tmp_path)], env={"COLUMNS": "160"}, standalone_mode=False).output
    assert f"effect: {line}" in " ".join(shown.split())


def test_a_number_that_is_not_finite_is_none_in_the_record() -> None:
    found = Effect(1, float("nan"), 1.0, float("inf"), 1.0, None)
    assert found.to_dict() == {
        "step": 1,
        "loss": None,
        "loss_without": 1.0,
        "gradient_norm": None,
        "gradient_norm_without": 1.0,
        "cosine": None,
    }
    read = Effect(**found.to_dict())
    assert read.line() == "without it, step 1 has loss 1 instead of nan, and gradient norm 1 instead of nan"


def test_a_step_that_fails_without_the_repair_is_an_answer(doubled: Any, tmp_path: Path) -> None:
    class Picky(doubled.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            loss = super().training_step(model, inputs, *args)
            if float(loss) < 1.5:
                raise KeyError("aux_loss")
            return loss

    api.apply(measure_effect=True)
    trainer = trained(doubled, tmp_path, Picky)
    assert record_of(tmp_path)["effect"] == {"step": 1, "why": "without it the step fails: KeyError: 'aux_loss'"}
    assert trainer.state.global_step == 2


def test_a_memory_that_is_too_small_is_an_answer(doubled: Any, tmp_path: Path) -> None:
    class Large(doubled.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        calls = 0

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            Large.calls += 1
            if Large.calls == 2:
                raise torch.OutOfMemoryError("out of memory")
            return super().compute_loss(*args, **kwargs)

    api.apply(measure_effect=True)
    trainer = trained(doubled, tmp_path, Large)
    assert record_of(tmp_path)["effect"]["why"] == "without it the step fails: there is not enough memory"
    assert trainer.state.global_step == 2


def test_a_step_that_moves_weights_is_not_taken_again(doubled: Any, tmp_path: Path) -> None:
    class Moving(doubled.module.MadeUpTrainer):  # type: ignore[misc, name-defined]
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            loss = super().training_step(model, inputs, *args)
            with torch.no_grad():
                self.model.weight.add_(1.0)
            return loss

    api.apply(measure_effect=True)
    trainer = trained(doubled, tmp_path, Moving)
    assert record_of(tmp_path)["effect"] == {"step": 1, "why": "the step itself changes Moving.model_wrapped.weight"}
    moved = float(trainer.model.weight)
    api.apply(measure_effect=False, strict=True)
    assert float(trained(doubled, tmp_path, Moving).model.weight) == moved


@pytest.mark.parametrize(
    ("attributes", "why"),
    [
        ({"kind": "DEEPSPEED"}, "DEEPSPEED keeps the gradients in a way of its own"),
        ({"kind": "FSDP"}, "FSDP keeps the gradients in a way of its own"),
        ({"kind": "MEGATRON_LM"}, "MEGATRON_LM keeps the gradients in a way of its own"),
        ({"use_vllm": True}, "vLLM would generate other text for the same step"),
        ({"gradient_as_bucket_view": True}, "DDP keeps the gradients in its buckets (gradient_as_bucket_view)"),
        ({"training_step": None}, "this trainer has a loop of its own, without training_step()"),
    ],
)
def test_what_cannot_be_measured_says_why_and_runs(
    attributes: dict[str, Any],
    why: str,
    doubled: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    api.apply(measure_effect=True)
    trainer = doubled.trainer(tmp_path)
    if "kind" in attributes:
        monkeypatch.setattr(type(trainer.accelerator), "distributed_type", attributes["kind"])
    trainer.args.use_vllm = attributes.get("use_vllm", False)
    trainer.model_wrapped.gradient_as_bucket_view = attributes.get("gradient_as_bucket_view", False)
    if "training_step" in attributes:
        trainer.training_step = None
    effect.begins(trainer, "effect/0")
    assert caplog.messages[-1] == f"the effect of the repairs is not measured: {why}"
    assert vars(trainer).get("training_step") is None


def test_a_run_without_a_repair_says_so(trl_like: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trl_hotfix")
    api.apply(measure_effect=True)
    trained(trl_like, tmp_path)
    assert "no effect to measure in step 1: no repair has acted by then" in caplog.messages


def test_a_diagnosis_has_no_effect(declare: Any, trl_like: Any, tmp_path: Path) -> None:
    declare(doubles(OWN_LOSS), double, attribute=OWN_LOSS, module=NAME, severity=Severity.DIAGNOSIS)
    api.apply(measure_effect=True)
    trained(trl_like, tmp_path)
    assert "effect" not in record_of(tmp_path)


def test_a_repair_outside_the_step_says_so(declare: Any, trl_like: Any, tmp_path: Path) -> None:
    prepare = "MadeUpTrainer.prepare"
    declare(doubles(prepare), double, attribute=prepare, module=NAME, called={prepare: Called.CONSTRUCTION})
    api.apply(measure_effect=True)
    trained(trl_like, tmp_path)
    assert record_of(tmp_path)["effect"] == {"step": 1, "why": "it acts outside training_step()"}


def test_a_micro_batch_that_cannot_be_kept_trains_all_the_same(
    doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(value: Any) -> Any:
        raise TypeError("no copy of this")

    monkeypatch.setattr(effect, "copied", fail)
    api.apply(measure_effect=True)
    trainer = trained(doubled, tmp_path)
    assert trainer.state.global_step == 2
    assert "the effect of the repairs is not measured (TypeError: no copy of this)" in caplog.text
    assert "effect" not in record_of(tmp_path)


def test_the_gradients_under_fp16_are_not_scaled(doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    api.apply(measure_effect=True)
    trainer = doubled.trainer(tmp_path)
    backward = trainer.accelerator.backward
    monkeypatch.setattr(trainer.accelerator, "backward", lambda loss, **kwargs: backward(8.0 * loss, **kwargs))
    monkeypatch.setattr(effect, "_scale_of", lambda accelerator: 8.0)
    trainer.train()
    assert record_of(tmp_path)["effect"] == DOUBLED


def test_a_training_step_of_the_trainer_itself_stays(doubled: Any, tmp_path: Path) -> None:
    api.apply(measure_effect=True)
    trainer = doubled.trainer(tmp_path)
    own = trainer.training_step
    calls = []
    trainer.training_step = stand_in = lambda *args: calls.append(1) or own(*args)
    trainer.train()
    assert vars(trainer)["training_step"] is stand_in
    # Two steps, and the first once more.
    assert len(calls) == 3


def test_a_run_that_ends_before_its_first_step_leaves_nothing(doubled: Any, tmp_path: Path) -> None:
    api.apply(measure_effect=True)
    trainer = doubled.trainer(tmp_path)
    effect.begins(trainer, "effect/0")
    assert isinstance(vars(trainer)["training_step"], effect._FirstStep)
    effect.begins(trainer, "effect/1")
    effect.ends(trainer)
    assert "training_step" not in vars(trainer)


# Several ranks


def agreed_by(answers: dict[int, Any], doubled: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return what rank 0 proposes, after what the others say."""
    api.apply(measure_effect=True)
    trainer = doubled.trainer(folder)
    monkeypatch.setattr(ranks, "rank_and_world", lambda: (0, len(answers)))
    monkeypatch.setattr(ranks, "gather", lambda own, moment: {**answers, 0: own})
    monkeypatch.setattr(ranks, "decide", lambda moment, proposal, waits: proposal)
    first = effect._FirstStep(trainer, "effect/0")
    first._note((trainer.model, {}), {})
    first._acted = {"made-up"}
    return first._agreed()


def test_all_ranks_take_what_acted_on_one(doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: None, 1: {"acted": ["another"], "why": ""}}
    assert agreed_by(answers, doubled, tmp_path, monkeypatch) == (["another", "made-up"], "")


def test_one_rank_that_cannot_is_enough(doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {0: None, 1: {"acted": [], "why": "the gradients are not whole in this process"}}
    assert agreed_by(answers, doubled, tmp_path, monkeypatch)[1] == "the gradients are not whole in this process"


def test_a_silent_rank_ends_it(doubled: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed_by({0: None, 1: None}, doubled, tmp_path, monkeypatch)[1].startswith("a rank did not answer within")
