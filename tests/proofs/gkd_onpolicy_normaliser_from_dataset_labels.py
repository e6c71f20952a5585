"""The proof: one optimizer step of two micro-batches with the real GKDTrainer, whose student answers at length.

The divergence of the first micro-batch is computed without TRL, and divided by its own tokens and the micro-batches.
"""

from __future__ import annotations

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
    """Nothing is generated: the tokens of the dataset are those of the loss."""
    seen = _train(lmbda=0.0)
    return tiny.TrainingResult(absent("nothing is generated"), seen.loss, seen.gradients)


def _train(lmbda: float) -> tiny.TrainingResult:
    import inspect

    import torch
    from datasets import Dataset

    trainer_class, config_class = tiny.classes("GKD")
    loss_of = getattr(trainer_class, "generalized_jsd_loss", None)
    if loss_of is None or "num_items_in_batch" not in inspect.signature(loss_of).parameters:
        return tiny.TrainingResult(absent("the loss is a mean over the micro-batch"))
    seen_batches: list[tuple[float, float, dict[str, Any]]] = []

    class Measured(trainer_class):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            kept = {name: inputs[name].clone() for name in ("input_ids", "attention_mask", "labels")}
            result = super().compute_loss(model, inputs, *args, **kwargs)
            seen_batches.append((float(result.detach()), float(kwargs["num_items_in_batch"]), kept))
            return result

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        rows = [[*(10 + (11 * row + 3 * place) % 50 for place in range(4 + row)), 1] for row in range(len(input_ids))]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        return SimpleNamespace(sequences=torch.cat([input_ids, padded], dim=1))

    words = tiny.tokenizer()
    words.chat_template = "{% for each in messages %}{{ each['content'] }} {% endfor %}"
    said = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3 w4"}]
    with tempfile.TemporaryDirectory() as folder:
        (student, alone), teacher = (tiny.llama(folder, seed=0) for _ in range(2)), tiny.llama(folder, seed=1)
        student.generate = generate
        trainer = tiny.trainer(
            Measured,
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
            train_dataset=Dataset.from_list([{"messages": said}] * 8),
            tokenizer=words,
        )
        seen = tiny.FirstStep(student)
        trainer.train()
        loss, items, batch = seen_batches[0]
        with torch.no_grad():
            both = [
                each(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1].softmax(-1)
                for each in (alone, teacher)
            ]
    mixture = BETA * both[1] + (1 - BETA) * both[0]
    weights = (1 - BETA, BETA)
    jsd = sum(weight * (each * (each / mixture).log()).sum(-1) for weight, each in zip(weights, both, strict=True))
    counted = batch["labels"][:, 1:] != -100
    whole, tokens = float((jsd * counted).sum()), float(counted.sum())
    if not lmbda:
        return tiny.TrainingResult(judge(loss, right=whole / items, wrong=-1.0), loss, seen.gradients)
    outcome = judge(loss, right=whole / (tokens * STEPS), wrong=whole / items, tokens=tokens, items=items)
    return tiny.TrainingResult(outcome, loss, seen.gradients)
