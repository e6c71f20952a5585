"""Each evaluation dataset has its own metrics beside the common ones, and may choose the best checkpoint."""

from __future__ import annotations

import dataclasses
import inspect
import tempfile
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from trl_hotfix.testing import stub_that_logs

import tiny
from tiny.grpo_runs import grpo

NAMES = (
    "DPO",
    "CPO",
    "ORPO",
    "TPO",
    "KTO",
    "Reward",
    "GRPO",
    "RLOO",
    "SFT",
    "A2PO",
    "SDFT",
    "SDPO",
    "SSD",
    "Distillation",
)


def module_of(name: str) -> Any:
    trainer_class = tiny.classes(name)[0]
    if trainer_class is None or "log" not in vars(trainer_class):
        pytest.skip("this release has no such trainer, or it logs nothing of its own")
    code = inspect.unwrap(trainer_class.log).__code__
    stores = "_stored_metrics" in code.co_names and name != "KTO"
    if not stores and ("mode" not in code.co_varnames or "should_evaluate" in code.co_names):
        pytest.skip("training and evaluation have the same lists, or log adds sums up")
    return inspect.getmodule(inspect.unwrap(trainer_class.log))


def evaluated(name: str, logs: dict[str, Any], **metrics: float) -> tuple[Any, dict[str, Any]]:
    """Log an evaluation with these metrics, and return the trainer and what its callbacks get."""
    trainer, logged = stub_that_logs(module_of(name))
    stores = "_stored_metrics" in vars(trainer)
    for key, value in metrics.items():
        if stores:
            trainer._stored_metrics["eval"][f"eval_{key}"].append(value)
        else:
            trainer._metrics["eval"][key].append(value)
    trainer.log(logs)
    return trainer, logged


@pytest.mark.parametrize("name", NAMES)
def test_a_metric_has_the_name_of_its_dataset_too(name: str, switch: Any) -> None:
    logs = {"eval_easy_loss": 2.0, "eval_easy_runtime": 1.0}
    trainer, logged = evaluated(name, logs, margin=0.5)
    assert {key: logged[key] for key in logged if "margin" in key} == {"eval_margin": 0.5, "eval_easy_margin": 0.5}
    assert trainer.state.log_history[-1]["eval_easy_margin"] == 0.5
    # This is what evaluate returns.
    assert logs["eval_easy_margin"] == 0.5
    with switch.off():
        _, as_it_is = evaluated(name, {"eval_easy_loss": 2.0, "eval_easy_runtime": 1.0}, margin=0.5)
    assert {key: logged[key] for key in logged if key != "eval_easy_margin"} == as_it_is


@pytest.mark.parametrize("name", NAMES)
def test_the_next_dataset_has_none_of_it(name: str) -> None:
    trainer, _ = evaluated(name, {"eval_easy_runtime": 1.0}, margin=0.5)
    trainer.log({"eval_hard_runtime": 1.0})
    assert not [key for key in trainer.state.log_history[-1] if "margin" in key]


@pytest.mark.parametrize(
    "logs", [{"eval_loss": 2.0, "eval_runtime": 1.0}, {"test_easy_runtime": 1.0}, {"eval_easy_loss": 2.0}], ids=str
)
def test_without_a_named_dataset_nothing_changes(logs: dict[str, float], switch: Any) -> None:
    patched, as_it_is = dict(logs), dict(logs)
    _, logged = evaluated("DPO", patched, margin=0.5)
    with switch.off():
        _, expected = evaluated("DPO", as_it_is, margin=0.5)
    assert (logged, patched) == (expected, as_it_is)


def test_a_dataset_may_have_an_underscore() -> None:
    _, logged = evaluated("DPO", {"eval_very_hard_runtime": 1.0}, margin=0.5)
    assert logged["eval_very_hard_margin"] == 0.5


def test_the_best_checkpoint_may_be_that_of_one_dataset() -> None:
    """TRL itself ends the run: evaluate returns no eval_easy_reward."""
    module_of("GRPO")
    config_class = tiny.classes("GRPO")[1]
    known = {field.name for field in dataclasses.fields(config_class)}
    steps = [0]

    def reward(prompts: list[str], **kwargs: Any) -> list[float]:
        # The easy prompt gets worse with each step, the hard one better.
        return [1.0 - 0.25 * steps[0] if prompt.startswith("w1 ") else 0.25 * steps[0] for prompt in prompts]

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            steps[0] = state.global_step

    best = {}
    for metric in ("eval_easy_reward", "eval_hard_reward"):
        settings: dict[str, Any] = {
            "num_generations": 2,
            "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2,
        }
        settings |= {"max_steps": 2, "beta": 0.0, "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
        with tempfile.TemporaryDirectory() as folder:
            policy = tiny.llama(folder, seed=0)
            settings |= {"output_dir": folder, "reward_funcs": reward, "prompts": ["w1 w2", "w3 w4"]}
            trainer = grpo(tiny.classes("GRPO")[0], policy, None, (3, 5), **settings)
            whole = trainer.train_dataset
            trainer.eval_dataset = {"easy": whole.select([0]), "hard": whole.select([1])}
            setattr(trainer.args, "eval_strategy" if "eval_strategy" in known else "evaluation_strategy", "steps")
            trainer.args.metric_for_best_model, trainer.args.greater_is_better = metric, True
            trainer.args.load_best_model_at_end = True
            trainer.add_callback(Steps())
            trainer.train()
            best[metric] = Path(trainer.state.best_model_checkpoint).name
    assert best == {"eval_easy_reward": "checkpoint-1", "eval_hard_reward": "checkpoint-2"}
