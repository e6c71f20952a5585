"""CPO and ORPO log ``logits/chosen`` and ``logits/rejected`` as means over prompt and padding too.

``get_batch_loss_metrics`` takes the mean of all logits that ``concatenated_forward`` returns, those after the last
token included. Longer prompts move it, and so does another padding token. DPO, from 0.12.0 on, has the mean over the
positions that predict the completion.

For the call, ``concatenated_forward`` returns that mean in place of the logits, which nothing else reads.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import absent_if_reexported, default_arguments, stub_trainer

_SIDES = ("chosen", "rejected")


@wrapper
def average_over_the_completions(call: Call) -> Any:
    """Have the metrics computed from the logits that predict a token of the completion."""
    trainer, batch = call.trainer, call["batch"]
    masks = [_predicting(trainer, batch[f"{side}_labels"]) for side in _SIDES]
    # A decoder has no prompt. Without padding TRL's mean is right.
    if trainer.is_encoder_decoder and masks[0].shape == masks[1].shape and all(mask.all() for mask in masks):
        return call()
    forward = trainer.concatenated_forward

    def with_means(*args: Any, **kwargs: Any) -> Any:
        chosen, rejected, *logits_and_losses = forward(*args, **kwargs)
        means = map(_mean, logits_and_losses, masks)
        return (chosen, rejected, *means, *logits_and_losses[2:])

    with shadowed(trainer, "concatenated_forward", with_means):
        return call()


def _predicting(trainer: Any, labels: Any) -> Any:
    """Return which positions predict a token of the completion."""
    of_completion = labels != getattr(trainer, "label_pad_token_id", -100)
    return of_completion if trainer.is_encoder_decoder else of_completion[:, 1:]


def _mean(logits: Any, mask: Any) -> Any:
    """Return the mean of the logits at these positions. TRL pads the logits to the longer side."""
    of_positions = logits.detach()[:, : mask.shape[1]].mean(-1)
    return of_positions[mask.to(logits.device)].float().mean()[None]


def metric_is_the_mean_of_the_completion(module: ModuleType) -> Outcome:
    """Read ``logits/chosen`` of a prompt of one token and two tokens: (1 + 2) / 2, and with the last position 11."""
    import torch

    name = "CPO" if hasattr(module, "CPOTrainer") else "ORPO"
    trainer_class = getattr(module, f"{name}Trainer")
    if reexported := absent_if_reexported(module, trainer_class.get_batch_loss_metrics):
        return reexported
    logits = [torch.tensor([[[1.0], [2.0], [30.0]]]), torch.tensor([[[4.0], [50.0], [60.0]]])]
    logps = [torch.tensor([value], requires_grad=True) for value in (-1.0, -2.0)]
    trainer = stub_trainer(
        trainer_class,
        default_arguments(getattr(module, f"{name}Config")),
        is_encoder_decoder=False,
        aux_loss_enabled=False,
        concatenated_forward=lambda model, batch: (*logps, *logits, torch.tensor(0.5)),
    )
    batch = {"chosen_labels": torch.tensor([[-100, 5, 6]]), "rejected_labels": torch.tensor([[-100, 7, -100]])}
    _, metrics = trainer.get_batch_loss_metrics(None, batch)
    return judge(float(metrics["logits/chosen"]), right=1.5, wrong=11.0)
