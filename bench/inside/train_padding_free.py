"""Run inside one release: compare padded and flattened batches for every attention, cache and checkpointing.

python -m bench.inside.train_padding_free OUT.json
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import trl_hotfix

import tiny

LENGTHS = (5, 9, 3, 7)


def rows() -> list[dict[str, list[int]]]:
    # No two sequences are equal.
    ids = [[3 + (7 * row + 3 * place) % 50 for place in range(length)] for row, length in enumerate(LENGTHS)]
    return [{"input_ids": row, "completion_mask": [0, 0, *[1] * (len(row) - 2)]} for row in ids]


def one_step(
    folder: str, *, make_model: Any = tiny.llama, prompts: bool = False, packing: bool = False, **settings: Any
) -> tuple[Any, Any, Any]:
    """The trainer after one step, the gradients of it, and the batch and the loss that it saw."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    names = ("input_ids", "completion_mask") if prompts else ("input_ids",)
    dataset = Dataset.from_list([{name: row[name] for name in names} for row in rows()])
    # 1.16.0 wants to be told that it need not cut the rows of a flattened batch. They are shorter anyway.
    longest = None if settings.get("padding_free") and not packing else 16
    usual = {"per_device_train_batch_size": len(LENGTHS), "max_length": longest, "completion_only_loss": prompts}
    trainer = tiny.trainer(
        tiny.measured(SFTTrainer),
        model=make_model(folder, seed=0),
        args=tiny.config(SFTConfig, **{**usual, "packing": packing, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    batch = {key: value for key, value in trainer.batches[0].items() if hasattr(value, "shape")}
    batch |= {key: value for key, value in trainer.keywords[0].items() if key == "num_items_in_batch"}
    return trainer, trainer.step, {"batch": batch, "loss": trainer.losses[0]}


def run_of(folder: str, attention: str, use_cache: bool, **settings: Any) -> dict[str, Any]:
    """Train one step and evaluate. Loss and gradients are sums over tokens, whatever number transformers divides by."""

    def make_model(folder: str, *, seed: int) -> Any:
        model = tiny.llama(folder, seed=seed)
        model.config._attn_implementation = model.model.config._attn_implementation = attention
        model.config.use_cache = use_cache
        if settings.get("window"):
            model.config.sliding_window = 4
        return model

    config = {key: value for key, value in settings.items() if key != "window"}
    trainer, step, record = one_step(folder, make_model=make_model, learning_rate=0.0, **config)
    assert trainer.model.config._attn_implementation == attention, "the trainer has another model"
    labels = record["batch"]["labels"]
    tokens = int(record["batch"].get("num_items_in_batch", 0)) or int((labels[:, 1:] != -100).sum())
    return {
        "loss": record["loss"] * tokens,
        "gradient": {name: (value * tokens).flatten().tolist() for name, value in step.gradients.items()},
        "counted": [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log],
        "eval": trainer.evaluate()["eval_loss"],
        "rows": len(labels),
    }


def difference(padded: dict[str, Any], flat: dict[str, Any]) -> dict[str, float]:
    gradient = max(
        abs(a - b)
        for name, values in padded["gradient"].items()
        for a, b in zip(values, flat["gradient"][name], strict=True)
    )
    return {
        "loss": abs(padded["loss"] - flat["loss"]),
        "gradient": gradient,
        "eval": abs(padded["eval"] - flat["eval"]),
        "counted": float(padded["counted"] != flat["counted"]),
    }


def main(out: str) -> None:
    trl_hotfix.apply(only=["sft-padding-free-contamination"], strict="all", unknown_body="try")
    import dataclasses

    from trl import SFTConfig

    fields = {field.name for field in dataclasses.fields(SFTConfig)}
    differences: dict[str, dict[str, float]] = {}
    # transformers counts the first token of a padded row as a label. In a prompt it is a label in neither batch.
    usual: dict[str, Any] = {"prompts": "completion_only_loss" in fields}
    with tempfile.TemporaryDirectory() as folder:
        for attention, use_cache, checkpointing in itertools.product(("sdpa", "eager"), (True, False), (False, True)):
            settings = {**usual, "gradient_checkpointing": checkpointing}
            differences[f"{attention} cache={use_cache} checkpointing={checkpointing}"] = difference(
                run_of(folder, attention, use_cache, **settings),
                run_of(folder, attention, use_cache, padding_free=True, **settings),
            )
        plain = run_of(folder, "sdpa", True, **usual)
        differences["window"] = difference(
            run_of(folder, "sdpa", True, window=True, **usual),
            run_of(folder, "sdpa", True, window=True, padding_free=True, **usual),
        )
        if "packing_strategy" in fields:
            # Two rows of 16 tokens hold all 24; the order of the sequences does not matter.
            differences["packing"] = difference(
                plain, run_of(folder, "sdpa", True, packing=True, eval_packing=False, **usual)
            )
    Path(out).write_text(json.dumps(differences))


if __name__ == "__main__":
    main(*sys.argv[1:])
