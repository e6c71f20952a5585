"""With several ranks SFT divides the loss of each by the tokens of that rank, and averages the gradients.

``Trainer`` of transformers counts the labels of the step on each rank, and has the model divide by this count. Only
with ``average_tokens_across_devices`` it sums the counts of all ranks, and multiplies the loss by the ranks, as
``DistributedDataParallel`` averages. TRL 0.19.0 turns that on (pull request 3538).

Here the setting stays off. transformers 4.46.0 and 4.46.1 do not have it. Up to 4.47.1 it ends in a ``TypeError`` where
an epoch ends with a whole step, up to 4.48.3 it multiplies the losses of evaluations too, and everywhere whatever else
is in the loss: a router's auxiliary loss, label smoothing, and the loss of a model that leaves the count alone.
Instead ``training_step`` is given the mean of the counts. Divided by it, the losses of the ranks have the mean that a
sum over all tokens, divided by all tokens, has.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, wrapper
from ...model import Outcome
from ...testing import CharacterTokenizer, as_tokenizer_of, constructed, default_arguments, single_process


@wrapper
def divide_by_the_mean_count(call: Call) -> None:
    """Make the trainer, and have it train with the mean of the counts of all ranks."""
    call()
    trainer = call.trainer
    # The configs of other self-tests have no such number.
    if getattr(trainer.args, "world_size", 1) > 1 and _is_sft(trainer):
        # A nested function could not be pickled with the trainer.
        trainer.training_step = functools.partial(_training_step, trainer, call.act_later())


def _training_step(
    trainer: Any, act: Callable[[], None], model: Any, inputs: Any, num_items_in_batch: Any = None
) -> Any:
    train: Callable[..., Any] = type(trainer).training_step
    summed = getattr(trainer.args, "average_tokens_across_devices", False)
    if num_items_in_batch is None or summed or not _takes_the_count(trainer):
        return train(trainer, model, inputs, num_items_in_batch)
    act()
    return train(trainer, model, inputs, _mean_of_ranks(trainer.accelerator, num_items_in_batch))


def _takes_the_count(trainer: Any) -> bool:
    """Return whether the model or the user's loss is given the count. transformers 4.48.1 to 4.51 counts always."""
    return bool(trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None)


def _mean_of_ranks(accelerator: Any, count: Any) -> Any:
    """Return the mean of the counts of all ranks: a tensor if ``count`` is one, and a number if not."""
    import torch

    counts = accelerator.gather(torch.as_tensor(count, device=accelerator.device))
    mean = counts.sum() / accelerator.num_processes
    return mean if isinstance(count, torch.Tensor) else mean.item()


def _is_sft(trainer: Any) -> bool:
    """Return whether this is SFT, or a class of the user's, and not a trainer of TRL with a loss of its own (GKD)."""
    of_trl = next(owner for owner in type(trainer).__mro__ if owner.__module__.partition(".")[0] == "trl")
    return of_trl.__name__ == "SFTTrainer"


def tokens_of_all_ranks_weigh_the_same(module: ModuleType) -> Outcome:
    """Differentiate the loss of a step in which this rank has two labels, and the other one six.

    If both ranks divide by four, the mean of their gradients equals the sum over all eight labels, divided by eight.
    """
    import torch
    from transformers import Trainer
    from transformers.modeling_outputs import CausalLMOutput

    if "num_items_in_batch" not in inspect.signature(Trainer.training_step).parameters:
        return absent("this transformers divides by no count")
    args = default_arguments(module.SFTConfig, n_gpu=1, world_size=2, dataset_kwargs={"skip_prepare_dataset": True})
    if getattr(args, "average_tokens_across_devices", False):
        return absent("average_tokens_across_devices is on by default")

    class Model(torch.nn.Module):  # type: ignore[misc]
        config = SimpleNamespace(_name_or_path="")

        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(()))

        def forward(self, labels: Any, num_items_in_batch: Any, **inputs: Any) -> Any:
            loss = self.weight * (labels != -100).sum() / num_items_in_batch
            return CausalLMOutput(loss=loss, logits=torch.zeros(*labels.shape, 2))

    given = {"args": args, "data_collator": len, **as_tokenizer_of(module.SFTTrainer, CharacterTokenizer())}
    model = Model()
    with single_process(module):
        trainer = constructed(module.SFTTrainer, model=model, train_dataset=[{"input_ids": [3]}], **given)
    vars(trainer).update(model_accepts_loss_kwargs=True, compute_loss_func=None, label_smoother=None, optimizer=None)
    vars(trainer).update(use_apex=False, _prepare_inputs=dict, compute_loss_context_manager=nullcontext)
    trainer.state, trainer.control = SimpleNamespace(global_step=0), SimpleNamespace(should_evaluate=False)
    vars(trainer.accelerator).update(
        num_processes=2,
        distributed_type="MULTI_CPU",
        gather=lambda count: torch.stack([count, torch.tensor(6)]),
        gather_for_metrics=lambda metric: metric,
        unwrap_model=lambda model, **keywords: model,
        backward=lambda loss, **keywords: loss.backward(),
    )
    labels = torch.tensor([[-100, 3, 4]])
    batch = {"input_ids": labels.clamp(min=1), "attention_mask": torch.ones_like(labels), "labels": labels}
    trainer.training_step(model, batch, 2)
    return judge(float(model.weight.grad), right=2 / 4, wrong=2 / 2)
