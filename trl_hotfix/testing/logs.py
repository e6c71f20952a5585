"""A trainer of any method that logs what it has evaluated."""

from __future__ import annotations

import inspect
from collections import defaultdict
from types import ModuleType, SimpleNamespace
from typing import Any

from .grpo import metrics_by_mode
from .trainers import stub_trainer


def trainer_class_of(module: ModuleType) -> Any:
    """Return the trainer that a module is named after, such as ``RewardTrainer`` of ``reward_trainer``."""
    name = module.__name__.rpartition(".")[2].replace("_", "")
    return next(getattr(module, each) for each in dir(module) if each.lower() == name)


def stub_that_logs(module: ModuleType, args: Any = None, **attributes: Any) -> tuple[Any, dict[str, Any]]:
    """Return a stub of this module's trainer in evaluation, and the logs that its callbacks get."""
    from transformers import Trainer

    logged: dict[str, Any] = {}
    trainer_class = trainer_class_of(module)
    of_modes = "_metrics" in inspect.unwrap(trainer_class.log).__code__.co_names

    def on_log(args: Any, state: Any, control: Any, logs: dict[str, Any]) -> Any:
        logged.update(logs)
        return control

    defaults: dict[str, Any] = {
        "model": SimpleNamespace(training=False),
        "control": SimpleNamespace(should_evaluate=True),
        "state": SimpleNamespace(epoch=None, global_step=1, log_history=[], num_input_tokens_seen=0),
        "callback_handler": SimpleNamespace(on_log=on_log),
        "log_completions": False,
        "_prepare_inputs": lambda inputs: inputs,
        "_total_train_tokens": 0,
    }
    defaults |= {"_metrics": metrics_by_mode()} if of_modes else {"_stored_metrics": defaultdict(metrics_of_a_mode)}
    args = args or SimpleNamespace(center_rewards_coefficient=None, report_to=[])
    args.include_num_input_tokens_seen = False if "no" not in _constants(Trainer.log) else "no"
    trainer = stub_trainer(trainer_class, args, **{**defaults, **attributes})
    trainer.accelerator.gradient_state = SimpleNamespace(end_of_dataloader=False, remainder=-1)
    return trainer, logged


def metrics_of_a_mode() -> Any:
    """Return the lists of one mode."""
    return defaultdict(list)


def _constants(method: Any) -> tuple[Any, ...]:
    return inspect.unwrap(method).__code__.co_consts  # type: ignore[no-any-return]
