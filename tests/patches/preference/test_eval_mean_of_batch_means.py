"""Only means of rows change, only where batches differ, and the best checkpoint is the one of the rows."""

from __future__ import annotations

import dataclasses
import inspect
import math
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from trl_hotfix.testing import stub_that_logs

import tiny
from tiny.data import preferences_of_several_lengths
from tiny.grpo_runs import grpo

TIMES = ("runtime", "per_second", "time", "epoch", "step")


def module_of(name: str) -> Any:
    trainer_class = tiny.classes(name)[0]
    if trainer_class is None or "log" not in vars(trainer_class):
        pytest.skip("this release has no such trainer, or it logs nothing of its own")
    return inspect.getmodule(inspect.unwrap(trainer_class.log))


def logged(batches: list[tuple[int, dict[str, float]]], **attributes: Any) -> dict[str, Any]:
    """Return what DPO logs of batches with so many pairs and these metrics."""
    module = module_of("DPO")
    trainer, logs = stub_that_logs(
        module, use_dpo_data_collator=True, _peft_has_been_casted_to_bf16=False, **attributes
    )
    stores = "_stored_metrics" in vars(trainer)

    trainer.compute_loss_context_manager = torch.no_grad
    for pairs, metrics in batches:

        def compute(*args: Any, metrics: dict[str, float] = metrics, **kwargs: Any) -> Any:
            if stores:
                return torch.zeros(()), {f"eval_{name}": value for name, value in metrics.items()}
            for name, value in metrics.items():
                trainer._metrics["eval"][name].append(value)
            return torch.zeros(())

        trainer.compute_loss = trainer.get_batch_loss_metrics = compute
        name = "chosen_input_ids" if stores else "input_ids"
        trainer.prediction_step(trainer.model, {name: torch.ones((1 if stores else 2) * pairs, 1)}, True)
    trainer.log({"eval_loss": 0.0})
    return logs


def test_metrics_of_rows_are_weighed_and_others_stay(switch: Any) -> None:
    names = ("rewards/chosen", "rewards/accuracies", "logps/rejected", "logits/chosen", "nll_loss", "entropy")
    batches = [(8, dict.fromkeys(names, 0.0)), (1, dict.fromkeys(names, 1.0))]
    patched = logged(batches)
    with switch.off():
        as_it_is = logged(batches)
    assert {name: patched[f"eval_{name}"] for name in names[:3]} == pytest.approx(dict.fromkeys(names[:3], 1 / 9))
    assert {name: as_it_is[f"eval_{name}"] for name in names} == dict.fromkeys(names, 0.5)
    assert {name: patched[f"eval_{name}"] for name in names[3:]} == dict.fromkeys(names[3:], 0.5)


@pytest.mark.parametrize("values", [(0.1, 0.7), (0.3, math.nan)], ids=str)
def test_equal_batches_and_nan_stay_bit_by_bit(values: tuple[float, float], switch: Any) -> None:
    batches = [(3 if math.isnan(sum(values)) else 2, {"rewards/chosen": values[0]}), (2, {"rewards/chosen": values[1]})]
    patched = logged(batches)
    with switch.off():
        as_it_is = logged(batches)
    assert repr(patched) == repr(as_it_is)


def test_the_third_side_of_tpo_counts_no_pair() -> None:
    module = module_of("TPO")
    for alpha, sides in ((1.0, 3), (0.0, 2)):
        trainer, logs = stub_that_logs(module, tpo_alpha=alpha, compute_loss_context_manager=torch.no_grad)
        for pairs, value in ((3, 0.0), (1, 1.0)):

            def compute(*args: Any, value: float = value, trainer: Any = trainer, **kwargs: Any) -> Any:
                trainer._metrics["eval"]["rewards/chosen"].append(value)
                return torch.zeros(())

            trainer.compute_loss = compute
            trainer.prediction_step(trainer.model, {"input_ids": torch.ones(sides * pairs, 1)}, True)
        trainer.log({"eval_loss": 0.0})
        assert logs["eval_rewards/chosen"] == 1 / 4


def test_training_stays(switch: Any) -> None:
    """In training the lists keep plain numbers."""
    module = module_of("Reward")
    trainer, _ = stub_that_logs(module, model=SimpleNamespace(training=True), _tp_size=1)
    for pairs in (2, 1):
        ids = torch.ones(2 * pairs, 1)
        trainer.compute_loss(
            lambda input_ids, **others: SimpleNamespace(logits=input_ids), {"input_ids": ids, "attention_mask": ids}
        )
    assert {type(value) for values in trainer._metrics["train"].values() for value in values} <= {int, float}


def run_of_grpo(folder: str, **settings: Any) -> Any:
    """Train two steps of GRPO, whose rewards depend on batch and step: batches of four rows and of two."""
    module_of("GRPO")
    config_class = tiny.classes("GRPO")[1]
    known = {field.name for field in dataclasses.fields(config_class)}
    strategy = "eval_strategy" if "eval_strategy" in known else "evaluation_strategy"
    steps: list[int] = [0]

    def reward(prompts: list[str], **kwargs: Any) -> list[float]:
        # After step 1 those of the short batch are large.
        return [float(len(prompts) == 2) if steps[0] < 2 else 0.4 for _ in prompts]

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, *others: Any, **kwargs: Any) -> None:
            steps[0] = state.global_step

    prompts = [f"w{number} w{number + 1}" for number in (1, 2, 3)]
    defaults: dict[str, Any] = {
        "num_generations": 2,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "beta": 0.0,
    }
    defaults |= {"max_steps": 2, "optim": "sgd", "learning_rate": 0.1, "output_dir": folder, "eval_steps": 1}
    defaults |= {"save_strategy": "steps", "save_steps": 1, **settings}
    with tempfile.TemporaryDirectory() as models:
        policy = tiny.llama(models, seed=0)
        trainer = grpo(tiny.classes("GRPO")[0], policy, None, (3, 5), reward_funcs=reward, prompts=prompts, **defaults)
    trainer.eval_dataset = trainer.train_dataset
    setattr(trainer.args, strategy, "steps")
    trainer.args.metric_for_best_model, trainer.args.greater_is_better = "eval_reward", True
    trainer.args.load_best_model_at_end = True
    trainer.add_callback(Steps())
    trainer.train()
    return trainer


def of_training(trainer: Any) -> list[Any]:
    history = [
        {name: value for name, value in logs.items() if not name.endswith(TIMES) and name != "eval_reward"}
        for logs in trainer.state.log_history
    ]
    rewards = ("eval_rewards/reward/mean", "eval_frac_reward_zero_std")
    return [{name: value for name, value in logs.items() if name not in rewards} for logs in history]


def test_the_best_checkpoint_is_that_of_the_rows(switch: Any) -> None:
    """After step 1 four rows have 0 and two have 1, after step 2 all have 0.4. The mean of batch means takes step 1."""
    module = module_of("GRPO")
    if "logs.update" not in inspect.getsource(inspect.unwrap(module.GRPOTrainer.log)):
        pytest.skip("evaluate does not return TRL's own metrics")
    with tempfile.TemporaryDirectory() as folder:
        patched = run_of_grpo(folder)
        generators = torch.get_rng_state()
    with tempfile.TemporaryDirectory() as folder, switch.off():
        as_it_is = run_of_grpo(folder)
        assert generators.equal(torch.get_rng_state())
    bests = [Path(trainer.state.best_model_checkpoint).name for trainer in (patched, as_it_is)]
    assert bests == ["checkpoint-2", "checkpoint-1"]
    evaluated = [
        [logs["eval_reward"] for logs in trainer.state.log_history if "eval_reward" in logs]
        for trainer in (patched, as_it_is)
    ]
    assert evaluated == [pytest.approx([1 / 3, 0.4]), pytest.approx([1 / 2, 0.4])]
    # Losses, gradient norms and all other metrics are the same.
    assert repr(of_training(patched)) == repr(of_training(as_it_is))


def test_losses_gradients_and_weights_stay_bit_by_bit(switch: Any) -> None:
    from datasets import Dataset

    trainer_class, config_class = tiny.classes("CPO")

    def weights() -> Any:
        vocabulary = tiny.tokenizer()
        vocabulary.bos_token = "<unk>"
        data = Dataset.from_list(list(preferences_of_several_lengths())[:5])
        with tempfile.TemporaryDirectory() as folder:
            model = tiny.llama(folder, seed=0)
        settings = {"max_steps": 2, "optim": "sgd", "learning_rate": 0.5, "max_length": 32, "max_prompt_length": 16}
        trainer = tiny.trainer(
            trainer_class,
            model=model,
            args=tiny.config(config_class, **settings),
            train_dataset=data,
            eval_dataset=data,
            tokenizer=vocabulary,
        )
        trainer.evaluate()
        trainer.train()
        history = [
            {name: value for name, value in logs.items() if not name.endswith(TIMES) and "eval_" not in name}
            for logs in trainer.state.log_history
        ]
        return trainer.model.state_dict(), history, torch.get_rng_state()

    torch.manual_seed(0)
    patched = weights()
    torch.manual_seed(0)
    with switch.off():
        as_it_is = weights()
    assert all(value.equal(as_it_is[0][name]) for name, value in patched[0].items())
    assert repr(patched[1]) == repr(as_it_is[1])
    assert patched[2].equal(as_it_is[2])
