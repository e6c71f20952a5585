"""Run inside one release: two steps of each of the four most used trainers that it has.

    python -m bench.inside.train_each OUT.json

OUT.json has the reason of each failure. A trainer that cannot be imported has failed.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import tiny
from bench.inside import trainers
from tiny.data import left_padding_tokenizer


def grpo(**settings: Any) -> Any:
    """Return a trainer that generates with the model. That of ``trainers`` replaces ``generate``."""
    from datasets import Dataset

    trainer_class, config_class = tiny.classes("GRPO")
    sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 4}
    return tiny.trainer(
        trainer_class,
        model=tiny.llama("models", seed=0),
        reward_funcs=lambda completions, **kwargs: [float(len(completion)) for completion in completions],
        args=tiny.config(config_class, **{**sizes, **settings}),
        train_dataset=Dataset.from_list([{"prompt": "w1 w2 w3"}] * 8),
        tokenizer=left_padding_tokenizer(),
    )


TRAINERS = {"SFT": trainers.sft, "DPO": trainers.dpo, "KTO": trainers.kto, "GRPO": grpo}


def train(name: str) -> None:
    module_name = f"trl.trainer.{name.lower()}_trainer"
    # GRPO came with 0.14.0.
    if importlib.util.find_spec(module_name) is not None:
        importlib.import_module(module_name)
        TRAINERS[name](max_steps=2).train()


def failure(name: str) -> str | None:
    """Return why the trainer does not train, or None if it does or if the release has none."""
    try:
        train(name)
    # Whatever a release raises beside a transformers that it does not fit is the answer.
    except Exception as error:  # noqa: BLE001
        reason = next(iter(str(error).splitlines()), "")
        return f"{name}: {type(error).__name__}: {reason}"
    return None


def main(out: str) -> None:
    reasons = [reason for name in TRAINERS if (reason := failure(name)) is not None]
    Path(out).write_text(json.dumps({"failures": reasons}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
