"""Train two steps of two micro-batches with SFT and LoRA, on a model that is marked as loaded in 8 bits.

The adapter is compared with one that AdamW of torch has trained in float32 on the same tokens, with the cross-entropy
that is computed without TRL. No weight of it is near 0, so in bfloat16 none of them moves. The mark is all that is
quantised.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID, TARGET = "qlora-adapter-frozen-in-bf16", "trl.trainer.sft_trainer:SFTTrainer.__init__"
OVERLAYS = ()
PARITY = False
VARIANTS = "an adapter is what the bug is about, and the weights are cast before the model is compiled"

LEARNING_RATE = 1e-5
TEXTS = [" ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(3 + index % 4)) for index in range(8)]


def base(*, quantised: bool = True) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
    return tiny.quantised(model) if quantised else model


def with_adapter(*, quantised: bool = True, dtype: Any = None) -> Any:
    """Return a PeftModel that has been trained, with weights of this dtype."""
    from peft import get_peft_model

    model = far_from_zero(get_peft_model(base(quantised=False), tiny.lora()))
    for weight in adapter(model).values():
        weight.data = weight.data.to(dtype)
    if quantised:
        tiny.quantised(model.base_model.model)
    return model


def adapter(model: Any) -> dict[str, Any]:
    weights = {name: weight for name, weight in model.named_parameters() if "lora_" in name}
    assert len(weights) == 8, weights
    return weights


def far_from_zero(model: Any) -> Any:
    """Give the adapter numbers between 0.3 and 0.7."""
    import torch

    for number, weight in enumerate(adapter(model).values()):
        numbers = 0.5 + 0.2 * torch.cos(number + torch.arange(weight.numel()))
        weight.data = numbers.reshape(weight.shape).to(weight.dtype)
    return model


def sft(model: Any, peft_config: Any = None) -> Any:
    """Return a trainer of a model after two steps, with the weights that it had before."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(
            SFTConfig,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_steps=2,
            optim="adamw_torch",
            learning_rate=LEARNING_RATE,
            weight_decay=0.0,
            max_length=32,
            loss_type="nll",
        ),
        train_dataset=Dataset.from_list([{"text": text} for text in TEXTS]),
        tokenizer=tiny.tokenizer(),
        peft_config=peft_config,
    )
    if peft_config is not None:
        # PEFT draws half of it at random, and the other half is 0.
        far_from_zero(trainer.model)
    trainer.before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    return trainer


def change(before: dict[str, Any], model: Any) -> float:
    """Return the sum of the changes of all weights of the adapter, each with another sign and size."""
    import torch

    changes = [
        (weight.detach().float() - before[name].float()).flatten() for name, weight in sorted(adapter(model).items())
    ]
    together = torch.cat(changes) / LEARNING_RATE
    return float((together * torch.cos(torch.arange(together.numel()))).sum())


def trained_by_hand(trainer: Any) -> float:
    """Train an adapter in float32 from the trainer's weights on its batches. Return how much it changes."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(base(quantised=False), tiny.lora())
    model.load_state_dict(trainer.before, strict=False)
    weights = list(adapter(model).values())
    assert {weight.dtype for weight in weights} == {torch.float32}
    optimizer = torch.optim.AdamW(weights, lr=LEARNING_RATE, weight_decay=0.0)
    for step in trainer.steps:
        assert len(step.micro_batches) == 2
        batches = [sft_steps.rows_of(micro_batch.inputs) for micro_batch in step.micro_batches]
        first = sft_steps.first_counted(step.micro_batches)
        count = sum(sft_steps.labels_in(rows, first) for rows in batches)
        for rows in batches:
            (sft_steps.cross_entropy(model, rows) / count).backward()
        optimizer.step()
        optimizer.zero_grad()
    return change(trainer.before, model)


def judged(trainer: Any) -> Any:
    """Judge how much the adapter has changed. Nothing else has."""
    import torch

    assert len(trainer.steps) == 2
    trained = adapter(trainer.model)
    for name, weight in trainer.model.named_parameters():
        assert weight.requires_grad is (name in trained), name
        assert name in trained or weight.equal(trainer.before[name]), name
    outcome = judge(change(trainer.before, trainer.model), right=trained_by_hand(trainer), wrong=0.0)
    dtypes = {weight.dtype for weight in trained.values()}
    assert dtypes == {torch.float32 if outcome.verdict is Verdict.FIXED else torch.bfloat16}, dtypes
    return outcome


def train() -> tiny.TrainingResult:
    if not casts():
        return tiny.TrainingResult(absent("in this release nothing is cast when the trainer is made"))
    new, given = sft(base(), tiny.lora()), sft(with_adapter())
    outcome = judged(new)
    if (other := judged(given)).verdict is not outcome.verdict:
        raise AssertionError(f"a new adapter: {outcome}; one that there is: {other}")
    return tiny.result_of_runs({"a new adapter": new, "an adapter": given}, outcome)


def casts() -> bool:
    import inspect

    from trl import SFTTrainer

    return "bfloat16" in inspect.unwrap(SFTTrainer.__init__).__code__.co_names


def unaffected() -> tiny.TrainingResult:
    """Train on a model that is not quantised, and an adapter in bfloat16 on one that is."""
    import torch

    runs = {
        "not quantised": sft(base(quantised=False), tiny.lora()),
        "not quantised, an adapter": sft(with_adapter(quantised=False)),
        "an adapter in bfloat16": sft(with_adapter(dtype=torch.bfloat16)),
    }
    for name, trainer in runs.items():
        if tiny.acts(ID, TARGET, trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("the model is not quantised, or the adapter is in bfloat16"))
