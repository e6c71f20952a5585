"""With gradient checkpointing transformers 4 drops the prefix of PEFT's prefix tuning, and the run trains nothing.

The prefix is a cache of keys and values that PEFT gives to the model. From 4.53 on a layer that is checkpointed takes
no cache: transformers sets ``past_key_values=None`` for it, and the loss is the frozen model's. PEFT raises an error if
the model checkpoints when the adapter is made. Most releases of TRL begin to checkpoint later, by default from 0.22 on.
Up to 4.52, and in transformers 5, the mask has the length of the prefix, and the run ends by an error.

``train`` switches the checkpointing on after it has asked for the dataloader, so it is switched off there.
"""

from __future__ import annotations

import logging
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, wrapper
from ...model import Outcome
from ...testing import class_with_steps, default_arguments, recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_is_first_warning = Once()


@wrapper
def train_the_prefix_without_checkpointing(call: Call) -> Any:
    """Switch gradient checkpointing off before a training of a prefix, and say so."""
    trainer = call.trainer
    if trainer.args.gradient_checkpointing and getattr(trainer, "is_in_train", False) and _has_prefix(trainer.model):
        call.act()
        trainer.args.gradient_checkpointing = False
        trainer.model.gradient_checkpointing_disable()
        if _is_first_warning(trainer) and trainer.accelerator.is_main_process:
            _log.warning(
                "%s: gradient checkpointing is off, since it drops the prefix of prefix tuning: nothing would be "
                "trained. A micro-batch takes more memory so: if it is too much, use a smaller one, or LoRA",
                type(trainer).__name__,
            )
    return call()


def _has_prefix(model: Any) -> bool:
    return str(getattr(getattr(model, "active_peft_config", None), "peft_type", "")).endswith("PREFIX_TUNING")


def checkpointing_is_off_for_a_prefix(module: ModuleType) -> Outcome:
    """Begin to train a prefix with gradient checkpointing, and ask whether ``train`` will switch it on."""
    import transformers
    from packaging.version import Version

    trainer_class = class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    if not Version("4.53") <= Version(transformers.__version__) < Version("5"):
        return absent("with this transformers such a run ends by an error")
    model = SimpleNamespace(
        active_peft_config=SimpleNamespace(peft_type="PREFIX_TUNING"), gradient_checkpointing_disable=lambda: None
    )
    settings = {"gradient_checkpointing": True, "process_index": 0, "precompute_ref_log_probs": False}
    trainer = stub_trainer(
        trainer_class,
        default_arguments(transformers.TrainingArguments, **settings),
        model=model,
        is_in_train=True,
        train_dataset=[1],
        data_collator=list,
        _train_batch_size=1,
        _get_train_sampler=lambda *args: None,
        _get_collator_with_removed_columns=lambda collator, description: collator,
    )
    trainer.accelerator.prepare = lambda loader: loader
    with recorded_warnings():
        trainer.get_train_dataloader()
    return judge(float(trainer.args.gradient_checkpointing), right=0.0, wrong=1.0)
