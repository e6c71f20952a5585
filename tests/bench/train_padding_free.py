"""Run inside one release: padded and flattened batches in every combination of what attention depends on.

python train_padding_free.py OUT.json
"""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import sft_padding_free_contamination as proof

import trl_hotfix

import tiny


def measured(folder: str, attention: str, use_cache: bool, **settings: Any) -> dict[str, Any]:
    """One step and one evaluation; the loss by token, so that it does not matter what transformers counts."""

    def make_model(folder: str, *, seed: int) -> Any:
        model = tiny.llama(folder, seed=seed)
        model.config._attn_implementation = model.model.config._attn_implementation = attention
        model.config.use_cache = use_cache
        if settings.get("window"):
            model.config.sliding_window = 4
        return model

    config = {key: value for key, value in settings.items() if key != "window"}
    trainer, step, seen = proof.one_step(folder, make_model=make_model, learning_rate=0.0, **config)
    assert trainer.model.config._attn_implementation == attention, "the trainer has another model"
    labels = seen["batch"]["labels"]
    tokens = int(seen["batch"].get("num_items_in_batch", 0)) or int((labels[:, 1:] != -100).sum())
    return {
        "loss": seen["loss"] * tokens,
        "gradient": {name: (value * tokens).flatten().tolist() for name, value in step.gradients.items()},
        "counted": [log["num_tokens"] for log in trainer.state.log_history if "num_tokens" in log],
        "eval": trainer.evaluate()["eval_loss"],
        "rows": len(labels),
    }


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    gradient = max(
        abs(a - b)
        for name, values in one["gradient"].items()
        for a, b in zip(values, other["gradient"][name], strict=True)
    )
    return {
        "loss": abs(one["loss"] - other["loss"]),
        "gradient": gradient,
        "eval": abs(one["eval"] - other["eval"]),
        "counted": float(one["counted"] != other["counted"]),
    }


def main(out: str) -> None:
    trl_hotfix.apply(only=["sft-padding-free-contamination"], strict=True, unknown_body="try")
    import dataclasses

    from trl import SFTConfig

    fields = {each.name for each in dataclasses.fields(SFTConfig)}
    found: dict[str, dict[str, float]] = {}
    # transformers counts the first token of a padded row among the labels; as part of a prompt it is none in either.
    usual: dict[str, Any] = {"prompts": "completion_only_loss" in fields}
    with tempfile.TemporaryDirectory() as folder:
        for attention, use_cache, checkpointing in itertools.product(("sdpa", "eager"), (True, False), (False, True)):
            settings = {**usual, "gradient_checkpointing": checkpointing}
            found[f"{attention} cache={use_cache} checkpointing={checkpointing}"] = difference(
                measured(folder, attention, use_cache, **settings),
                measured(folder, attention, use_cache, padding_free=True, **settings),
            )
        plain = measured(folder, "sdpa", True, **usual)
        found["window"] = difference(
            measured(folder, "sdpa", True, window=True, **usual),
            measured(folder, "sdpa", True, window=True, padding_free=True, **usual),
        )
        if "packing_strategy" in fields:
            # Two rows of 16 tokens hold all 24; the order of the sequences plays no part.
            found["packing"] = difference(
                plain, measured(folder, "sdpa", True, packing=True, eval_packing=False, **usual)
            )
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
