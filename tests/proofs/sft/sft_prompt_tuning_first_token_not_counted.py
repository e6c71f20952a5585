"""Train the real SFTTrainer two steps of two micro-batches with prompt tuning and with p-tuning, then evaluate.

The expected loss of a step is the mean cross-entropy of all its tokens, first ones too, one row at a time and
without TRL's code; the expected gradients are those of that loss. The wrong loss is divided by a token a row less.
"""

from __future__ import annotations

import inspect
import tempfile
from typing import Any

from trl_hotfix.authoring import absent, judge
from trl_hotfix.model import Outcome, Verdict

import tiny

ID = "sft-prompt-tuning-first-token-not-counted"
TARGET = "trl.trainer.sft_trainer:SFTTrainer._get_num_items_in_batch"
OVERLAYS = ()
PARITY = False
VARIANTS = "it is for one kind of adapter, and has it in every run"
EQUIVALENT = {
    'count_what_virtual_tokens_predict: `shifts = getattr(trainer, "_loss_shifts_labels", False)` -> '
    '`shifts = getattr(trainer, "_loss_shifts_labels", True)`': "each transformers in the range has the attribute",
}

LENGTHS = (5, 9, 3, 7, 4, 8, 6, 3)
ROWS = [
    {"input_ids": [3 + (7 * row + 3 * place) % 60 for place in range(length)]} for row, length in enumerate(LENGTHS)
]
SETTINGS = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 2, "max_length": 32}
SETTINGS |= {"completion_only_loss": False, "gradient_checkpointing": False}


def soft_prompt(folder: str, kind: str) -> Any:
    """Return a Llama with three virtual tokens. Those of ``Prefix`` are keys and values."""
    import peft
    import torch

    sizes = {"encoder_hidden_size": 8} if kind == "PromptEncoder" else {}
    config_class = getattr(peft, "PrefixTuningConfig" if kind == "Prefix" else f"{kind}Config")
    torch.manual_seed(1)
    return peft.get_peft_model(
        tiny.llama(folder, seed=0), config_class(task_type="CAUSAL_LM", num_virtual_tokens=3, **sizes)
    )


def two_steps(model: Any) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    dataset = Dataset.from_list(ROWS)
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=model,
        args=tiny.config(SFTConfig, **SETTINGS),
        train_dataset=dataset,
        eval_dataset=dataset.select(range(2)),
        tokenizer=tiny.tokenizer(),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def sum_of(model: Any, batch: Any) -> Any:
    """Return the sum of the cross-entropy of all tokens of each row: a virtual token predicts the first."""
    import torch

    rows = [ids[mask.bool()] for ids, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)]
    return sum(
        torch.nn.functional.cross_entropy(model(row[None]).logits[0, -len(row) - 1 : -1].float(), row, reduction="sum")
        for row in rows
    )


def train() -> tiny.TrainingResult:
    from transformers import Trainer

    if "_loss_shifts_labels" not in inspect.unwrap(Trainer.__init__).__code__.co_names:
        return tiny.TrainingResult(absent("this transformers counts first tokens"))
    with tempfile.TemporaryDirectory() as folder:
        runs = {kind: two_steps(soft_prompt(folder, kind)) for kind in ("PromptTuning", "PromptEncoder")}
        outcomes = [judged(run, soft_prompt(folder, kind)) for kind, run in runs.items()]
    assert len({outcome.verdict for outcome in outcomes}) == 1, outcomes
    return tiny.result_of_runs(runs, outcomes[0])


def judged(trainer: Any, model: Any) -> Outcome:
    assert [len(step.micro_batches) for step in trainer.steps] == [2, 2]
    for step in trainer.steps:
        tokens, rows = (sum(int(one.inputs["attention_mask"].sum()) for one in step.micro_batches), 4)
        model.load_state_dict(step.weights)
        total = sum(float(sum_of(model, one.inputs).detach()) for one in step.micro_batches)
        loss = sum(one.loss for one in step.micro_batches)
        outcome = judge(loss, right=total / tokens, wrong=total / (tokens - rows))
        count = tokens if outcome.verdict is Verdict.FIXED else tokens - rows
        expected = tiny.expected_gradients(
            model,
            step.weights,
            lambda model, step=step, count=count: sum(sum_of(model, one.inputs) for one in step.micro_batches) / count,
        )
        assert step.difference(expected) < 1e-5, f"gradients differ by {step.difference(expected)}"
    if outcome.verdict is Verdict.FIXED:
        model.load_state_dict(trainer.model.state_dict())
        (one,) = trainer.evaluations
        right = float(sum_of(model, one.inputs).detach()) / int(one.inputs["attention_mask"].sum())
        assert abs(one.loss - right) < 1e-5, f"an evaluation has the loss {one.loss}: expected {right}"
        acted = tiny.acts(ID, TARGET, trainer)
        # Of two steps, and of the evaluation where it is divided by a count.
        assert acted in (None, 2, 3), f"the wrapper acts in {acted} counts"
    return outcome


def unaffected() -> tiny.TrainingResult:
    """Train a prefix and a whole model, in which nothing predicts first tokens."""
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            "prefix": two_steps(soft_prompt(folder, "Prefix")),
            "whole": two_steps(tiny.llama(folder, seed=0)),
        }
    for name, run in runs.items():
        assert not tiny.acts(ID, TARGET, run), f"the wrapper acts: {name}"
    return tiny.result_of_runs(runs, absent("no first token is predicted"))
