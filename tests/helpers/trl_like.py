"""A module like one of TRL's, with a trainer that can train. Its file can be edited and reloaded."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_hotfix.model import Outcome, Verdict

NAME = "trl.trainer.made_up_trainer"
SOURCE = """
from transformers import Trainer


def scaled(x):
    return x


def scaled_too(x):
    return x


class MadeUpTrainer(Trainer):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.prepare(1)

    def prepare(self, x):
        return x

    def compute_loss(self, model, inputs, return_outputs=False, **kwargs):
        loss = self.own_loss(model(**inputs))
        return (loss, {}) if return_outputs else loss

    def own_loss(self, loss):
        return loss

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        return self.evaluated(self.compute_loss(model, inputs).detach()), None, None

    def evaluated(self, loss):
        return loss


class OverridingTrainer(MadeUpTrainer):
    def own_loss(self, loss):
        return loss
"""


class TrlLike:
    """The module, imported anew, and its file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.path.write_text(SOURCE, encoding="utf-8")
        self.module: Any = importlib.import_module(NAME)

    def reload(self, method: str = "own_loss", body: str | None = None) -> ModuleType:
        """Execute the file again, as autoreload does, with another body of a method of ``MadeUpTrainer``."""
        if body is not None:
            head, name, rest = SOURCE.partition(f"    def {method}(self, loss):\n")
            self.path.write_text(head + name + f"        {body}\n" + rest.partition("\n")[2], encoding="utf-8")
        return importlib.reload(self.module)

    def trainer(self, folder: Path, cls: Any = None, callbacks: Any = (), **settings: Any) -> Any:
        """Return a trainer of two steps, of ``MadeUpTrainer`` or of ``cls``."""
        import torch
        from transformers import TrainingArguments

        args = {"max_steps": 2, "per_device_train_batch_size": 1, "logging_steps": 1, "save_strategy": "no", **settings}
        arguments = TrainingArguments(str(folder), report_to="none", use_cpu=True, disable_tqdm=True, **args)
        data = [{"x": torch.ones(1)} for _ in range(4)]
        trainer_class = cls or self.module.MadeUpTrainer
        return trainer_class(line(), arguments, train_dataset=data, eval_dataset=data[:1], callbacks=list(callbacks))


def line() -> Any:
    """Return a model of one weight. Torch is imported here, as the tests of the scan run where there is none."""
    import torch

    class Line(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).mean()

    return Line()


def double(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
    """A wrapper with a visible effect: the made-up bug is that a method does not return twice its argument."""
    return wrapped(*args, **kwargs) * 2


def doubles(attribute: str) -> Any:
    """Return the self-test of a patch of ``attribute``."""

    def is_doubled(module: Any) -> Outcome:
        *owners, name = attribute.split(".")
        owner = object.__new__(getattr(module, owners[0])) if owners else module
        number = getattr(owner, name)(1)
        return Outcome(Verdict.FIXED if number == 2 else Verdict.REPRODUCED, {"number": number})

    return is_doubled
