"""A trainer that was never made, and is about to ask for the loader of its training."""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

from trl_hotfix.testing import stub_trainer


def about_to_train(target: Any, args: Any, loader: Any, *, main: bool = True, **attributes: Any) -> Any:
    """Return a stub of the class that has the target, whose accelerator makes ``loader``. ``main`` is its process."""
    usual: dict[str, Any] = {
        "train_dataset": [1],
        "data_collator": list,
        "is_in_train": True,
        "_train_batch_size": 1,
        "_get_train_sampler": lambda *args: None,
        "_get_collator_with_removed_columns": lambda collator, description: collator,
    }
    trainer_class = getattr(import_module(target.module), target.attribute.partition(".")[0])
    trainer = stub_trainer(trainer_class, args, **{**usual, **attributes})
    trainer.accelerator = SimpleNamespace(is_main_process=main, prepare=lambda made: loader)
    return trainer
