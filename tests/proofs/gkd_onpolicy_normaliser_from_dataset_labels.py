"""Train one optimizer step of two micro-batches with the real GKDTrainer, whose student generates long completions.

The divergence of the first micro-batch is computed without TRL, and divided by its own tokens and the micro-batches.
"""

from __future__ import annotations

import inspect
import tempfile
from types import SimpleNamespace
from typing import Any

from trl_hotfix.authoring import absent, judge

import tiny

OVERLAYS = ()
PARITY = False

STEPS, BETA = 2, 0.5


def train() -> tiny.TrainingResult:
    return _train(lmbda=1.0)


def unaffected() -> tiny.TrainingResult:
    """Train on the dataset's completions, so the loss is over the dataset's tokens."""
    result = _train(lmbda=0.0)
    return tiny.TrainingResult(absent("nothing is generated"), result.loss, result.gradients)


def _train(lmbda: float) -> tiny.TrainingResult:
    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes("GKD")
    loss_of = getattr(trainer_class, "generalized_jsd_loss", None)
    if loss_of is None or "num_items_in_batch" not in inspect.signature(loss_of).parameters:
        return tiny.TrainingResult(absent("the loss is a mean over the micro-batch"))

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[*(10 + (11 * row + 3 * place) % 50 for place in range(4 + row)), 1] for row in range(len(input_ids))]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        return SimpleNamespace(sequences=torch.cat([input_ids, padded], dim=1))

    tokenizer = tiny.tokenizer()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    conversation = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    with tempfile.TemporaryDirectory() as folder:
        (student, untrained), teacher = (tiny.llama(folder, seed=0) for _ in range(2)), tiny.llama(folder, seed=1)
        student.generate = generate
        trainer = tiny.trainer(
            tiny.measured(trainer_class),
            model=student,
            teacher_model=teacher,
            args=tiny.config(
                config_class,
                gradient_accumulation_steps=STEPS,
                lmbda=lmbda,
                beta=BETA,
                max_new_tokens=8,
                max_length=16,
                temperature=1.0,
            ),
            train_dataset=Dataset.from_list([{"messages": conversation}] * 8),
            tokenizer=tokenizer,
        )
        trainer.train()
    loss, batch, gradients = trainer.losses[0], trainer.batches[0], trainer.step.gradients
    items = float(trainer.keywords[0]["num_items_in_batch"])
    divergence, tokens = _summed_divergence(untrained, teacher, batch)
    if not lmbda:
        return tiny.TrainingResult(judge(loss, right=divergence / items, wrong=-1.0), loss, gradients)
    right, wrong = divergence / (tokens * STEPS), divergence / items
    return tiny.TrainingResult(judge(loss, right=right, wrong=wrong, tokens=tokens, items=items), loss, gradients)


def _summed_divergence(student: Any, teacher: Any, batch: dict[str, Any]) -> tuple[float, float]:
    """Return the generalized Jensen-Shannon divergence, summed over the labels of the batch, and their number."""
    import torch

    with torch.no_grad():
        student_probs, teacher_probs = (
            model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].softmax(-1)
            for model in (student, teacher)
        )
    mixture = BETA * teacher_probs + (1 - BETA) * student_probs
    jsd = sum(
        weight * (probs * (probs / mixture).log()).sum(-1)
        for weight, probs in ((1 - BETA, student_probs), (BETA, teacher_probs))
    )
    mask = batch["labels"][:, 1:] != -100
    return float((jsd * mask).sum()), float(mask.sum())
