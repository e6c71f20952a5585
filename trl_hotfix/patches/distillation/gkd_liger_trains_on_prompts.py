"""With Liger before 0.6.5, GKD, GOLD and DistillationTrainer distil the teacher on prompts and padding too.

``compute_loss`` gives ``LigerFusedLinearJSDLoss`` all positions, with a label of -100 where none counts. Up to 0.6.4
the divergence ignores the labels. Liger divides the sum by the length of the first dimension: by all positions, or
where TRL does not flatten them (GKD always, GOLD before 1.0) by the rows of the batch. Liger 0.6.5 leaves these
positions out and divides by the others (Liger PR 974).

During ``compute_loss`` the trainer has a view of the kernel that gives it the positions with a label only, in one
dimension: Liger's divisor is then their number.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, distillation_stub, divergence, give_decoder, trainer_and_config


@wrapper
def give_liger_the_labels_only(call: Call) -> Any:
    """Run ``compute_loss`` with a kernel that sees the positions with a label only, if the loss is Liger's."""
    trainer, act = call.trainer, call.act_later()
    # Renamed in TRL 1.8.
    name = "liger_loss" if hasattr(trainer, "liger_loss") else "liger_jsd_loss"
    if not hasattr(trainer, name):
        return call()
    kernel = getattr(trainer, name)

    def of_labels(*, student_input: Any, teacher_input: Any, true_labels: Any, **others: Any) -> Any:
        act()
        counts = true_labels != kernel.ignore_index
        if not counts.any():  # Liger would divide by 0.
            return 0 * student_input.sum()
        return kernel(
            student_input=student_input[counts],
            teacher_input=teacher_input[counts],
            true_labels=true_labels[counts],
            **others,
        )

    with shadowed(trainer, name, of_labels):
        return call()


def prompts_have_no_gradient(module: ModuleType) -> Outcome:
    """Compare the gradients of a token of the prompt and of the completion behind it."""
    import torch

    trainer_class, config_class = trainer_and_config(module, "GKD", "GOLD", "Distillation")
    if reexported := absent_if_reexported(module, trainer_class.compute_loss):
        return reexported
    loss_class = getattr(module, "LigerFusedLinearJSDLoss", None)
    if loss_class is None:
        return absent("TRL finds no Liger, or has its loss elsewhere")
    kernel = loss_class(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.5, compiled=False)
    names = inspect.unwrap(trainer_class.__init__).__code__.co_names
    name = "liger_loss" if "liger_loss" in names else "liger_jsd_loss"
    trainer = distillation_stub(
        trainer_class,
        config_class,
        use_liger_gkd_loss=True,
        use_liger_loss=True,
        use_uld_loss=False,
        _is_vlm=False,
        _buffered_num_items=None,
        _local_teacher_tokenizer_matches_student=True,
        _forward_redirection=lambda model, module, method, *args: method(*args),
        **{name: kernel},
    )
    for model in (trainer.model, trainer.teacher_model):
        give_decoder(model)
    token_ids = torch.tensor([[1, 2, 3]])
    batch = {
        "input_ids": token_ids,
        "attention_mask": torch.ones_like(token_ids),
        "labels": torch.tensor([[-100, -100, 3]]),
        "prompts": token_ids[:, :2],
    }
    loss = trainer.compute_loss(trainer.model, batch)
    of_all = divergence(trainer, token_ids).sum()
    measured, wrong = (
        float(gradient[1].norm() / gradient[2].norm())
        for gradient in (torch.autograd.grad(value, trainer.model.weight)[0] for value in (loss, of_all))
    )
    return judge(measured, right=0.0, wrong=wrong)
