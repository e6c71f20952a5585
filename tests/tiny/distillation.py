"""Runs of trainers that distil a teacher: how long the completions are, and the divergence by its formula."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

from .trainers import classes


def divides_by_a_count(name: str) -> bool:
    """Return whether the trainer of this name divides its loss by a count that it is given."""
    loss_of = getattr(classes(name)[0], "generalized_jsd_loss", None)
    return loss_of is not None and "num_items_in_batch" in inspect.signature(loss_of).parameters


def divergence(student: Any, teacher: Any, batch: dict[str, Any], *, beta: float) -> Any:
    """Return the generalized Jensen-Shannon divergence, summed over the labels of the batch."""
    import torch

    def probabilities(model: Any) -> Any:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits[:, :-1].softmax(-1)

    with torch.no_grad():
        of_teacher = probabilities(teacher)
    of_student = probabilities(student)
    mixture = beta * of_teacher + (1 - beta) * of_student
    divergence = sum(
        weight * (probs * (probs / mixture).log()).sum(-1)
        for weight, probs in ((1 - beta, of_student), (beta, of_teacher))
    )
    return (divergence * (batch["labels"][:, 1:] != -100)).sum()


def predicted_labels(batch: dict[str, Any]) -> int:
    """Return how many labels of a batch are predicted: the first of a row is not."""
    return int((batch["labels"][:, 1:] != -100).sum())


def divisor(trainer: Any, batch: dict[str, Any], counted: int | None) -> float:
    """Return what ``compute_loss`` divides the sum over the tokens by, in the loss and in its gradient.

    ``trainer`` is a ``distillation_stub``, and ``counted`` the number of tokens that it is given.
    """
    import torch

    from trl_hotfix import testing

    count = None if counted is None else torch.tensor(counted)
    loss = trainer.compute_loss(trainer.model, dict(batch), num_items_in_batch=count)
    total = (testing.divergence(trainer, batch["input_ids"]) * (batch["labels"][:, 1:] != -100)).sum()
    by = float(total / loss)
    gradient, right = (torch.autograd.grad(value, trainer.model.weight)[0] for value in (loss, total / by))
    torch.testing.assert_close(gradient, right, rtol=1e-4, atol=1e-7)
    return by


def growing_completions() -> Any:
    """Return a ``generate`` whose rows are unequally long, and longer in every call, with the end of sequence."""
    import torch

    calls: list[Any] = []

    def generate(input_ids: Any, **kwargs: Any) -> Any:
        calls.append(input_ids)
        rows = [
            [*(10 + (11 * row + 3 * place + len(calls)) % 50 for place in range(2 + len(calls) + row)), 1]
            for row in range(len(input_ids))
        ]
        longest = max(map(len, rows))
        padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
        return SimpleNamespace(sequences=torch.cat([input_ids, padded], dim=1))

    return generate
