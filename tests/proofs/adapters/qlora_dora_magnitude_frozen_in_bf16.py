"""Train two steps of two micro-batches with SFT and DoRA, on a model that is marked as loaded in 8 bits.

The magnitude vectors are compared with those of a model that AdamW of torch has trained on the same tokens, with the
cross-entropy that is computed without TRL, and LoRA's matrices in bfloat16. The mark is all that is quantised.
"""

from __future__ import annotations

import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Verdict

import tiny
from tiny import sft_steps

ID, TARGET = "qlora-dora-magnitude-frozen-in-bf16", "trl.trainer.sft_trainer:SFTTrainer.__init__"
OVERLAYS = ()
PARITY = True
VARIANTS = "an adapter is what the bug is about, and the weights are cast before the model is compiled"

LEARNING_RATE = 1e-5
"""With 1e-4 some of the magnitudes move in bfloat16, too: those that are small, or a power of 2."""
TEXTS = [" ".join(f"w{(7 * index + 3 * place) % 56}" for place in range(3 + index % 4)) for index in range(8)]
NAME = "lora_magnitude_vector"


def dora(*, use_dora: bool = True) -> Any:
    config = tiny.lora()
    config.use_dora = use_dora
    return config


def base(*, quantised: bool = True) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.llama(folder, seed=0)
    return tiny.quantised(model) if quantised else model


def with_adapter(*, use_dora: bool = True) -> Any:
    """Return a PeftModel whose adapter has been trained: none of its matrices is 0."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(base(quantised=False), dora(use_dora=use_dora))
    for number, (name, weight) in enumerate(model.named_parameters()):
        if NAME in name:
            weight.data *= 1.1
        elif "lora_" in name:
            weight.data = 0.5 * torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape)
    tiny.quantised(model.base_model.model)
    return model


def sft(model: Any, peft_config: Any = None) -> Any:
    """Return a trainer of a model, with the trained weights that it has before and after two steps."""
    import torch
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
        # PEFT draws these at random; the others begin with 0, and with the norms of the weights.
        for weight in [weight for name, weight in trainer.model.named_parameters() if "lora_A" in name]:
            index = torch.arange(weight.numel(), dtype=weight.dtype)
            weight.data.copy_(torch.sin(index).reshape(weight.shape))
    trainer.before = {name: value.detach().clone() for name, value in trainer.model.named_parameters()}
    trainer.train()
    return trainer


def change(before: dict[str, Any], model: Any) -> float:
    """Return the sum of the changes of all magnitudes."""
    return sum(
        float((weight.detach().float() - before[name].float()).abs().sum())
        for name, weight in model.named_parameters()
        if NAME in name
    )


def trained_by_hand(trainer: Any, model: Any) -> float:
    """Train a model by AdamW from the trainer's weights on its batches. Return how much its magnitudes change."""
    import torch

    model.load_state_dict(trainer.before, strict=False)
    for name, weight in model.named_parameters():
        if weight.requires_grad and NAME not in name:
            weight.data = weight.data.to(torch.bfloat16)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
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


def judged(trainer: Any, model: Any) -> Any:
    """Judge how much the magnitudes have changed. Everything else that is trained is in bfloat16, and has changed."""
    import torch

    assert len(trainer.steps) == 2
    trained = {name: weight for name, weight in trainer.model.named_parameters() if weight.requires_grad}
    matrices = {name: weight for name, weight in trained.items() if NAME not in name}
    assert {weight.dtype for weight in matrices.values()} == {torch.bfloat16}, matrices
    assert len(trained) == 12
    assert any(not value.equal(trainer.before[name]) for name, value in matrices.items())
    outcome = judge(change(trainer.before, trainer.model), right=trained_by_hand(trainer, model), wrong=0.0)
    dtypes = {weight.dtype for name, weight in trained.items() if NAME in name}
    assert dtypes == {torch.float32 if outcome.verdict is Verdict.FIXED else torch.bfloat16}, dtypes
    return outcome


def train() -> tiny.TrainingResult:
    from peft import get_peft_model

    if not casts():
        return tiny.TrainingResult(absent("in this release nothing is cast when the trainer is made"))
    new, given = sft(base(), dora()), sft(with_adapter())
    outcome = judged(new, get_peft_model(base(quantised=False), dora()))
    if (other := judged(given, with_adapter())).verdict is not outcome.verdict:
        raise AssertionError(f"a new adapter: {outcome}; one that there is: {other}")
    # LoRA's matrices are rounded, and releases compute the logits in other ways: what is rounded may differ.
    gradients = {name: value.float() for name, value in new.steps[0].gradients.items() if NAME in name}
    return tiny.TrainingResult(outcome, new.steps[0].micro_batches[0].loss, gradients)


def casts() -> bool:
    import inspect

    from trl import SFTTrainer

    return "bfloat16" in inspect.unwrap(SFTTrainer.__init__).__code__.co_names


def unaffected() -> tiny.TrainingResult:
    """Train DoRA on a model that is not quantised, and LoRA on one that is: a new adapter, and one that there is."""
    runs = {
        "not quantised": sft(base(quantised=False), dora()),
        "a new adapter": sft(base(), dora(use_dora=False)),
        "an adapter": sft(with_adapter(use_dora=False)),
        "all weights": sft(base(quantised=False)),
    }
    for name, trainer in runs.items():
        if tiny.acts(ID, TARGET, trainer):
            raise AssertionError(f"the wrapper acts: {name}")
    return tiny.result_of_runs(runs, absent("the model is not quantised, or the adapter is without magnitudes"))
