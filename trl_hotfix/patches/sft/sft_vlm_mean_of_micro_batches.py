"""SFT of a model with ``accepts_loss_kwargs = False`` takes the mean of the means of its micro-batches.

The attribute says that the model's own loss ignores ``num_items_in_batch``. ``Trainer`` then counts no tokens, and
divides by the micro-batches. From 1.15.0 on SFT does not ask the model for a loss: ``compute_loss`` divides the sum of
the log-probs by the count if there is one, and by the tokens of the micro-batch if not.

``Trainer`` reads ``model_accepts_loss_kwargs`` when it counts and when it divides, so the wrapper sets it. Transformers
before 5.15.0 smooths a mean in any case, and a subclass may compute a mean.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, module_of, wrapper
from ...model import Outcome
from ...testing import (
    constructed,
    default_arguments,
    quick_is_peft_model,
    quick_rows,
    single_process,
    tiny_attention_model,
    tiny_tokenizer,
)


@wrapper
def count_the_tokens_of_the_step(call: Call) -> Any:
    """Make the trainer, and let transformers count the tokens of a step for TRL's own loss."""
    result, trainer = call(), call.trainer
    if (
        not trainer.model_accepts_loss_kwargs
        and inspect.unwrap(type(trainer).compute_loss).__module__ == module_of(call).__name__
        and trainer.compute_loss_func is None
        and trainer.label_smoother is None
        and not getattr(getattr(trainer.accelerator, "parallelism_config", None), "sp_enabled", False)
    ):
        trainer.model_accepts_loss_kwargs = True
        call.act()
    return result


def tokens_of_the_step_are_counted(module: ModuleType) -> Outcome:
    """Count the tokens to predict of a step of two rows: five. Without a count each micro-batch is a mean."""
    import torch
    from transformers import Trainer

    if "fused_lm_head" not in str(inspect.unwrap(module.SFTTrainer.compute_loss).__code__.co_consts):
        return absent("in this release the model computes the loss")

    class OfSuchAModel(module.SFTTrainer):  # type: ignore[misc, name-defined]
        # ``Trainer`` takes them from the model and the config.
        model_accepts_loss_kwargs, label_smoother, compute_loss_func = False, None, None
        _loss_shifts_labels = True

        def get_tp_size(self) -> int:
            return 1

        get_cp_size = get_sp_size = get_tp_size

    settings: dict[str, Any] = {"dataset_kwargs": {"skip_prepare_dataset": True}, "dataset_text_field": "text"}
    settings |= {"n_gpu": 1, "world_size": 1, "average_tokens_across_devices": False, "loss_type": "nll"}
    # TRL sets a field of it for a stream.
    args = default_arguments(module.SFTConfig, accelerator_config=SimpleNamespace(dispatch_batches=None), **settings)
    model, rows = tiny_attention_model(), quick_rows([{"input_ids": [5]}])
    with single_process(module), quick_is_peft_model(module):
        trainer = constructed(
            OfSuchAModel, model=model, train_dataset=rows, args=args, processing_class=tiny_tokenizer()
        )
    device = ["cpu"] if "device" in inspect.signature(Trainer.get_batch_samples).parameters else []
    step = [{"labels": torch.tensor([[-100, 6, 7, 8], [-100, 5, 6, -100]])}]
    _, count = trainer.get_batch_samples(iter(step), 1, *device)
    return judge(float(count or 0), right=5.0, wrong=0.0)
