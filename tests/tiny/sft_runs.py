"""One step of the real SFTTrainer."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .data import chat_tokenizer
from .measuring import FirstStep, gradient_differences, loss_of
from .models import llama
from .trainers import config, trainer


@dataclass
class SftRun:
    """The first step of an SFT trainer: its loss, gradients and batch."""

    trainer: Any
    loss: float
    gradients: dict[str, Any]
    batch: dict[str, Any]

    def difference(self, other: SftRun) -> float:
        """Return the largest difference of the loss and of any gradient."""
        assert self.gradients
        assert self.gradients.keys() == other.gradients.keys()
        return max(abs(self.loss - other.loss), *gradient_differences(self.gradients, other.gradients))


def sft_step(
    rows: Any, *, words: Any = None, streaming: bool = False, trainer_arguments: Any = None, **settings: Any
) -> SftRun:
    """Train one step of the real SFTTrainer on all ``rows`` at once. ``rows`` are dicts.

    ``words`` is the tokenizer, ``chat_tokenizer()`` by default; ``trainer_arguments`` are arguments of the trainer,
    ``settings`` of its config. With ``streaming`` the dataset is an ``IterableDataset``.
    """
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    record: dict[str, Any] = {}

    class RecordFirstBatch(SFTTrainer):  # type: ignore[misc, valid-type]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            batch = {name: value for name, value in inputs.items() if hasattr(value, "shape")}
            result = super().compute_loss(model, inputs, *args, **kwargs)
            record.setdefault("batch", batch)
            record.setdefault("loss", loss_of(result))
            return result

    def as_dataset(rows: Any) -> Any:
        dataset = Dataset.from_list(rows)
        return dataset.to_iterable_dataset() if streaming else dataset

    arguments = dict(trainer_arguments or {})
    if isinstance(arguments.get("eval_dataset"), dict):
        arguments["eval_dataset"] = {name: as_dataset(split) for name, split in arguments["eval_dataset"].items()}
    defaults = {"per_device_train_batch_size": len(rows), "max_seq_length": 32, "dataset_text_field": "text"}
    # 0.15 makes the config a part of the fingerprint of the dataset, so folders must not have new names each time.
    defaults |= {name: str(Path(tempfile.gettempdir(), "sft")) for name in ("output_dir", "logging_dir")}
    with tempfile.TemporaryDirectory() as folder:
        model = llama(folder, seed=0)
        # LoRA starts with random weights.
        torch.manual_seed(0)
        step = FirstStep(model)
        sft_trainer = trainer(
            RecordFirstBatch,
            model=model,
            args=config(SFTConfig, **{**defaults, **settings}),
            train_dataset=as_dataset(rows),
            tokenizer=words if words is not None else chat_tokenizer(),
            **arguments,
        )
        sft_trainer.train()
    return SftRun(sft_trainer, record["loss"], step.gradients, record["batch"])


def several(runs: dict[str, SftRun]) -> tuple[float, dict[str, Any]]:
    """Return the sum of the losses, and all gradients, each prefixed with the name of its run."""
    gradients = {
        f"{run_name} {name}": gradient for run_name, run in runs.items() for name, gradient in run.gradients.items()
    }
    return sum(run.loss for run in runs.values()), gradients
