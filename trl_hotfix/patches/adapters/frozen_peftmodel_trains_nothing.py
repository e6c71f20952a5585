"""A ``PeftModel`` that was loaded for inference: the trainers take it, and train nothing.

``PeftModel.from_pretrained`` freezes the adapter unless it is given ``is_trainable=True`` (TRL issues 3031, 6700). With
gradient checkpointing TRL calls ``enable_input_require_grads``. So the loss has a graph, and ``backward`` works.
RLOO with ``beta > 0`` has a graph without it: PEFT makes the adapter trainable when it computes the reference, but by
then the optimizer is made.

``train`` calls ``get_train_dataloader`` before it makes the optimizer. RLOO has its own. So has GRPO, where
``grpo-zero-loss-diagnosis`` warns of a frozen adapter. TRL closed issue 6700 without a change.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, wrapper
from ...model import Outcome
from ...testing import default_arguments, recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_is_first_warning = Once()


@wrapper
def warn_of_a_frozen_model(call: Call) -> Any:
    """Warn once, on the main process, of a training that begins with a model whose parameters are all frozen."""
    trainer = call.trainer
    tensors = list(trainer.model.parameters())
    # Outside of a training somebody looks at the data, and may make the adapter trainable yet.
    is_frozen = bool(tensors) and not any(tensor.requires_grad for tensor in tensors)
    if is_frozen and getattr(trainer, "is_in_train", False) and _is_first_warning(trainer):
        call.act()
        if trainer.accelerator.is_main_process:
            _log.warning(
                "%s: nothing is trained, since all %d parameter tensors of the model are frozen. PEFT loads an adapter "
                "for inference by default: load it with PeftModel.from_pretrained(..., is_trainable=True)",
                type(trainer).__name__,
                len(tensors),
            )
    return call()


def frozen_model_is_reported(module: ModuleType) -> Outcome:
    """Begin to train a frozen model, and count the warnings."""
    import torch
    from transformers import TrainingArguments

    trainer_class: Any = getattr(module, "RLOOTrainer", None)
    config_class = module.RLOOConfig if trainer_class else TrainingArguments
    if trainer_class is None:
        trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    elif "num_generations" not in config_class.__dataclass_fields__:
        return absent("RLOO of this release has a training loop of its own")
    trainer = stub_trainer(
        trainer_class,
        default_arguments(config_class, steps_per_generation=1, process_index=0),
        model=torch.nn.Linear(1, 1).requires_grad_(False),
        is_in_train=True,
        train_dataset=[1],
        data_collator=list,
        _train_batch_size=1,
        _get_train_sampler=lambda *args: None,
        _get_collator_with_removed_columns=lambda collator, description: collator,
        _get_dataloader=lambda **arguments: None,
    )
    trainer.accelerator = SimpleNamespace(is_main_process=True, prepare=lambda loader: loader)
    with recorded_warnings() as lines:
        trainer.get_train_dataloader()
    return judge(sum("nothing is trained" in line for line in lines), right=1, wrong=0)
