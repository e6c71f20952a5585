"""GKD and GOLD: a trainer that distils a teacher, and the divergence of its two models by the formula."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from .models import tiny_causal_lm
from .trainers import default_arguments, stub_trainer


def distillation_stub(
    trainer_class: type, config_class: type, settings: dict[str, Any] | None = None, **attributes: Any
) -> Any:
    """Return a trainer that was never initialised, with a student of one matrix, in its first step.

    The teacher has the rows of the student's matrix in the other order. ``settings`` are arguments of the config,
    ``attributes`` those of the trainer. ``beta`` is 1/2.
    """
    import torch

    student, teacher = tiny_causal_lm(), tiny_causal_lm()
    with torch.no_grad():
        teacher.weight.copy_(student.weight.flip(0))
    defaults = {"beta": 0.5, "use_liger_gkd_loss": False, "get_tp_size": lambda: 1}
    return stub_trainer(
        trainer_class,
        default_arguments(config_class, **{"n_gpu": 1, "average_tokens_across_devices": True, **(settings or {})}),
        model=student,
        teacher_model=teacher,
        state=SimpleNamespace(global_step=0),
        **{**defaults, **attributes},
    )


def divergence(trainer: Any, token_ids: Any, *, mixes_log_probs: bool = False) -> Any:
    """Return the divergence of each predicted token, ``(rows, length - 1)``. It can be differentiated for the student.

    Half of KL(teacher, mixture) and half of KL(student, mixture), arXiv:2306.13649 with a beta of 1/2. The mixture is
    the mean of the probabilities; up to 0.11.2 TRL takes that of the log-probs.
    """
    students, teachers = (
        model.weight[token_ids[:, :-1]].log_softmax(-1) for model in (trainer.model, trainer.teacher_model)
    )
    teachers = teachers.detach()
    mixture = (students + teachers) / 2 if mixes_log_probs else ((students.exp() + teachers.exp()) / 2).log()
    return sum(0.5 * (side.exp() * (side - mixture)).sum(-1) for side in (students, teachers))
