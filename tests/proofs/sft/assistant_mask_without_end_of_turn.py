"""Train two steps of two micro-batches with ``assistant_only_loss`` and a template that ends its mask too early.

The expected loss and gradients are the model's own: the mean over the tokens of the assistants, ends of turns among
them, over both micro-batches of a step. The wrong ones leave the ends out.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from typing import Any

import trl_hotfix
from trl_hotfix.authoring import absent, judge

import tiny

ID = "assistant-mask-without-end-of-turn"

OVERLAYS = ()
PARITY = False
DATA = True
EQUIVALENT = {"applied twice": "the ends are in the mask when the second view sees it, and stay"}
VARIANTS = "the data are prepared before the model is compiled, and whatever part of it is trained"

END, ASSISTANT = 1, 62
USER = "{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] + ' <eos> ' }}{% else %}{{ 'w59 ' }}"
OUTSIDE = (
    f"{{% for message in messages %}}{USER}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{{ ' <eos> ' }}{% endif %}{% endfor %}"
)
INSIDE = (
    f"{{% for message in messages %}}{USER}"
    "{% generation %}{{ message['content'] + ' <eos>' }}{% endgeneration %}{{ ' ' }}{% endif %}{% endfor %}"
)
NEXT_MESSAGE_ENDS = (
    "{% for message in messages %}{% if not loop.first %}{{ ' <eos> ' }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ 'w58 ' + message['content'] }}{% else %}{{ 'w59 ' }}"
    "{% generation %}{{ message['content'] }}{% endgeneration %}{% endif %}{% endfor %}"
)


def conversations(rows: int = 8) -> list[dict[str, Any]]:
    """Return conversations of one turn or two, with answers of one to four words."""
    return [
        {"messages": [message for turn in range(1 + row % 2) for message in exchange(row, turn)]} for row in range(rows)
    ]


def exchange(row: int, turn: int) -> list[dict[str, str]]:
    answer = " ".join(f"w{(5 * row + 3 * place + turn) % 50}" for place in range(1 + (row + turn) % 4))
    return [{"role": "user", "content": f"w{row} w{turn}"}, {"role": "assistant", "content": answer}]


def labels_of(ids: list[int], *, ends: bool) -> list[int]:
    """Return the tokens of the answers, with or without their ends, and -100 elsewhere."""
    labels, is_answer = [], False
    for token in ids:
        is_trained = is_answer and (ends or token != END)
        labels.append(token if is_trained else -100)
        is_answer = token == ASSISTANT or (is_answer and token != END)
    return labels


def loss_of(batches: list[Any], *, ends: bool) -> Callable[[Any], Any]:
    """Return the loss of a step by the model's own logits: the mean over the labels of all its micro-batches."""
    import torch

    rows = [row[row != 0] for batch in batches for row in batch]
    labels = [torch.tensor(labels_of(row.tolist(), ends=ends)) for row in rows]
    count = sum(int((row != -100).sum()) for row in labels)

    def loss(model: Any) -> Any:
        entropies = [
            torch.nn.functional.cross_entropy(model(ids[None]).logits[0, :-1], targets[1:], reduction="sum")
            for ids, targets in zip(rows, labels, strict=True)
        ]
        return sum(entropies) / count

    return loss


def trained(template: str, *, assistant_only_loss: bool = True, streaming: bool = False, **settings: Any) -> Any:
    """Return a trainer that has trained two steps of two micro-batches, and evaluated two conversations."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    usual = {"max_steps": 2, "gradient_accumulation_steps": 2, "loss_type": "nll", "max_length": None}
    folders = {name: f"{tempfile.gettempdir()}/sft" for name in ("output_dir", "logging_dir")}
    usual |= {"assistant_only_loss": assistant_only_loss, **folders}
    dataset = Dataset.from_list(conversations())
    trainer = tiny.trainer(
        tiny.stepwise(SFTTrainer),
        model=tiny.llama("model", seed=0),
        args=tiny.config(SFTConfig, **{**usual, **settings}),
        train_dataset=dataset.to_iterable_dataset() if streaming else dataset,
        eval_dataset=Dataset.from_list(conversations(2)),
        tokenizer=tiny.chat_tokenizer(template),
    )
    trainer.train()
    trainer.evaluate()
    return trainer


def train() -> tiny.TrainingResult:
    from trl import SFTConfig
    from trl.trainer import sft_trainer

    if "assistant_only_loss" not in {field.name for field in dataclasses.fields(SFTConfig)}:
        return tiny.TrainingResult(absent("this release has no loss of the assistant's tokens alone"))
    patched = trl_hotfix.status()[ID].state.value == "applied"
    run = trained(OUTSIDE)
    check_by_the_formula(run, ends=patched)
    if patched:
        check_by_the_formula(trained(OUTSIDE, dataset_num_proc=2), ends=True)
        if hasattr(sft_trainer, "get_dataset_column_names"):  # before 0.23.1 a stream has to have known columns
            check_by_the_formula(trained(OUTSIDE, streaming=True), ends=True)
        check_a_template_that_ends_with_the_next_message()
    first = run.steps[0]
    model, batches = tiny.llama("model", seed=0), [batch.inputs["input_ids"] for batch in first.micro_batches]
    right, wrong = (float(loss_of(batches, ends=ends)(model).detach()) for ends in (True, False))
    outcome = judge(sum(batch.loss for batch in first.micro_batches), right=right, wrong=wrong)
    return tiny.TrainingResult(outcome, first.micro_batches[0].loss, first.gradients)


def check_by_the_formula(trainer: Any, *, ends: bool) -> None:
    """Check the gradients of both steps, and the loss of the evaluation."""
    import torch

    model = tiny.llama("model", seed=0)
    assert len(trainer.steps) == 2
    for step in trainer.steps:
        assert len(step.micro_batches) == 2
        loss = loss_of([batch.inputs["input_ids"] for batch in step.micro_batches], ends=ends)
        assert step.difference(tiny.expected_gradients(model, step.weights, loss)) < 1e-6
    (evaluation,) = trainer.evaluations
    with torch.no_grad():
        expected = float(loss_of([evaluation.inputs["input_ids"]], ends=ends)(trainer.model))
    assert abs(evaluation.loss - expected) < 1e-5, (evaluation.loss, expected)


def check_a_template_that_ends_with_the_next_message() -> None:
    """Train the ends of all turns but the last, which has none."""
    trainer = trained(NEXT_MESSAGE_ENDS)
    for row in trainer.train_dataset:
        expected = labels_of(row["input_ids"], ends=True)
        found = row.get("labels") or [
            token if bit else -100 for token, bit in zip(row["input_ids"], row["assistant_masks"], strict=True)
        ]
        assert found == expected, (found, expected)


def unaffected() -> tiny.TrainingResult:
    """Train by a template that has the ends inside its mask, and on all tokens."""
    runs = {"inside": trained(INSIDE), "all": trained(OUTSIDE, assistant_only_loss=False)}
    gradients = {
        f"{run} {number} {name}": gradient
        for run, trainer in runs.items()
        for number, step in enumerate(trainer.steps)
        for name, gradient in step.gradients.items()
    }
    losses = [batch.loss for trainer in runs.values() for step in trainer.steps for batch in step.micro_batches]
    losses += [batch.loss for trainer in runs.values() for batch in trainer.evaluations]
    return tiny.TrainingResult(
        absent("the end of each turn is in the mask, or there is no mask"), sum(losses), gradients
    )
