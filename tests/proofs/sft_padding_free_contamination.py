"""The proof: one step of the real SFTTrainer without padding, and the same rows padded.

What is right is what the same trainer does with ``padding_free=False``: the loss, every gradient, the number of tokens.
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
    # Lengths and words are such that every sequence differs from every other.
    ids = [[3 + (7 * row + 3 * place) % 50 for place in range(length)] for row, length in enumerate(LENGTHS)]
    return [{"input_ids": each, "completion_mask": [0, 0, *[1] * (len(each) - 2)]} for each in ids]


def one_step(
    folder: str, *, make_model: Any = tiny.llama, prompts: bool = False, packing: bool = False, **settings: Any
) -> tuple[Any, Any, Any]:
    """The trainer after one step, the gradients of it, and the batch and the loss that it saw."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    seen: dict[str, Any] = {}

    class Measured(SFTTrainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            batch = {key: value for key, value in inputs.items() if hasattr(value, "shape")}
            result = super().compute_loss(model, inputs, *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            seen.setdefault("batch", {**batch, **{key: kwargs[key] for key in kwargs if key == "num_items_in_batch"}})
            seen.setdefault("loss", float(loss.detach()))
            return result

    names = ("input_ids", "completion_mask") if prompts else ("input_ids",)
    dataset = Dataset.from_list([{name: row[name] for name in names} for row in rows()])
    model = make_model(folder, seed=0)
    step = tiny.FirstStep(model)
    # 1.16.0 wants to be told that it need not cut the rows of a flattened batch. They are shorter anyway.
    longest = None if settings.get("padding_free") and not packing else 16
    usual = {"per_device_train_batch_size": len(LENGTHS), "max_length": longest, "completion_only_loss": prompts}
    trainer = tiny.trainer(
        Measured,
        model=model,
        args=tiny.config(SFTConfig, **{**usual, "packing": packing, **settings}),
        train_dataset=dataset,
        eval_dataset=dataset,
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    return trainer, step, seen


def train() -> tiny.TrainingResult:
    import dataclasses

    import torch
    from trl import SFTConfig

    if "padding_free" not in {each.name for each in dataclasses.fields(SFTConfig)}:
        return tiny.TrainingResult(absent("SFTConfig has no padding_free"))
    with tempfile.TemporaryDirectory() as folder:
        padded, right_step, right = one_step(folder)
        trainer, step, seen = one_step(folder, padding_free=True)
        alone = tiny.llama(folder, seed=0)
        batch = seen["batch"]
        length = batch["input_ids"].shape[1]
        assert length == sum(LENGTHS)
        causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
        positions = batch.get("position_ids", torch.arange(length)[None])
        # transformers counts the first token of a padded row among the labels and that of a flattened one not.
        tokens = int(right["batch"].get("num_items_in_batch", 0)) or sum(LENGTHS) - len(LENGTHS)
        flat_tokens = int(batch.get("num_items_in_batch", 0)) or int((batch["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            one = alone(
                input_ids=batch["input_ids"], position_ids=positions, attention_mask=causal, use_cache=False
            ).logits
            wrong = torch.nn.functional.cross_entropy(one[0, :-1], batch["labels"][0, 1:], reduction="sum")
        outcome = judge(
            seen["loss"],
            right=right["loss"] * tokens / flat_tokens,
            wrong=float(wrong) / flat_tokens,
            tokens=flat_tokens,
        )
        if outcome.verdict.value == "fixed":
            assert seen["batch"]["labels"].ne(-100).sum() == sum(LENGTHS) - len(LENGTHS)
            for name, gradient in right_step.gradients.items():
                torch.testing.assert_close(step.gradients[name] * flat_tokens, gradient * tokens, atol=2e-5, rtol=1e-4)
            counted = [
                [log["num_tokens"] for log in each.state.log_history if "num_tokens" in log]
                for each in (trainer, padded)
            ]
            assert counted[0] == counted[1]
    return tiny.TrainingResult(outcome, seen["loss"], dict(step.gradients))
