"""The proof: one step of the real SFTTrainer without padding, and the same rows padded.

The same trainer with ``padding_free=False`` gives the expected loss, every gradient and the number of tokens.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = True

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


def train() -> tiny.TrainingResult:
    import dataclasses

    import torch
    from trl import SFTConfig

    if "padding_free" not in {field.name for field in dataclasses.fields(SFTConfig)}:
        return tiny.TrainingResult(absent("SFTConfig has no padding_free"))
    with tempfile.TemporaryDirectory() as folder:
        padded_trainer, padded_step, padded = one_step(folder)
        trainer, step, flattened = one_step(folder, padding_free=True)
        untrained = tiny.llama(folder, seed=0)
        batch = flattened["batch"]
        length = batch["input_ids"].shape[1]
        assert length == sum(LENGTHS)
        causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = batch.get("position_ids", torch.arange(length)[None])
        # transformers counts the first token of a padded row as a label, but not that of a flattened row.
        tokens = int(padded["batch"].get("num_items_in_batch", 0)) or sum(LENGTHS) - len(LENGTHS)
        flat_tokens = int(batch.get("num_items_in_batch", 0)) or int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            logits = untrained(
                input_ids=batch["input_ids"], position_ids=positions, attention_mask=causal, use_cache=False
            ).logits
            wrong = torch.nn.functional.cross_entropy(logits[0, :-1], batch["labels"][0, 1:], reduction="sum")
        outcome = judge(
            flattened["loss"],
            right=padded["loss"] * tokens / flat_tokens,
            wrong=float(wrong) / flat_tokens,
            tokens=flat_tokens,
        )
        if outcome.verdict.value == "fixed":
            assert batch["labels"].ne(-100).sum() == sum(LENGTHS) - len(LENGTHS)
            for name, gradient in padded_step.gradients.items():
                torch.testing.assert_close(step.gradients[name] * flat_tokens, gradient * tokens, atol=2e-5, rtol=1e-4)
            counted = [
                [entry["num_tokens"] for entry in run.state.log_history if "num_tokens" in entry]
                for run in (trainer, padded_trainer)
            ]
            assert counted[0] == counted[1]
    return tiny.TrainingResult(outcome, flattened["loss"], dict(step.gradients))
