"""Real trainers of the installed TRL, with tiny models. They train on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny


def dpo(folder: Path, model: Any = None, **arguments: Any) -> Any:
    """Return a DPOTrainer. ``settings`` are those of its config, the other arguments those of the trainer."""
    from trl import DPOConfig, DPOTrainer

    return _trainer(DPOTrainer, DPOConfig, folder, model, tiny.preferences(), arguments)


def sft(folder: Path, model: Any = None, **arguments: Any) -> Any:
    """Return an SFTTrainer of texts, as ``dpo`` does."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    texts = Dataset.from_dict({"text": ["w1 w2 w3", "w4 w5"] * 4})
    return _trainer(SFTTrainer, SFTConfig, folder, model, texts, arguments)


def _trainer(trainer: Any, config: Any, folder: Path, model: Any, dataset: Any, arguments: dict[str, Any]) -> Any:
    settings = {"output_dir": str(folder), **arguments.pop("settings", {})}
    given = {"train_dataset": dataset, "tokenizer": tiny.tokenizer(), **arguments}
    policy = model if model is not None else tiny.llama(str(folder), seed=0)
    return tiny.trainer(trainer, model=policy, args=tiny.config(config, **settings), **given)
