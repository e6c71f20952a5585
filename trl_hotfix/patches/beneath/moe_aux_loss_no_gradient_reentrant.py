"""With reentrant checkpointing the router auxiliary loss of a mixture of experts is in the loss, without a gradient.

From transformers 4.54 on a model records the logits of its routers while its layers run, and computes the auxiliary
loss of them. torch's reentrant checkpoint runs a layer without a graph first, and once more in the backward, so what is
recorded has no graph. Before 4.54 a layer returned the logits, through the checkpoint. A checkpoint that is not
reentrant builds the graph at once.

transformers 4 is reentrant unless ``gradient_checkpointing_kwargs`` say otherwise. TRL checkpoints by default from 0.22
on, and sets ``use_reentrant=False`` from 0.27.0 on. ``train`` reads the setting after it has asked for the dataloader.
From 0.29.0 on TRL forces True where PEFT meets ZeRO-3.
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
def checkpoint_without_reentry(call: Call) -> Any:
    """Set ``use_reentrant=False`` before a training that has the auxiliary loss, or warn if True was chosen."""
    trainer = call.trainer
    args = trainer.args
    if args.gradient_checkpointing and getattr(trainer, "is_in_train", False) and _has_aux_loss(trainer.model):
        settings = args.gradient_checkpointing_kwargs or {}
        if "use_reentrant" not in settings and _is_reentrant_by_default():
            call.act()
            args.gradient_checkpointing_kwargs = {**settings, "use_reentrant": False}
        elif settings.get("use_reentrant") and _is_first_warning(trainer):
            call.act()
            if trainer.accelerator.is_main_process:
                _log.warning(
                    "%s: the router auxiliary loss has no gradient, since gradient checkpointing is reentrant: nothing "
                    "balances the experts. Set gradient_checkpointing_kwargs={'use_reentrant': False}, or "
                    "gradient_checkpointing=False. TRL forces reentrant checkpointing with PEFT under ZeRO-3",
                    type(trainer).__name__,
                )
    return call()


def _has_aux_loss(model: Any) -> bool:
    """Return whether the model adds its auxiliary loss, with a coefficient that is not 0."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return any(
        getattr(each, "output_router_logits", False) and bool(getattr(each, "router_aux_loss_coef", 0))
        for each in (config, text)
    )


def _is_reentrant_by_default() -> bool:
    import transformers

    return str(transformers.__version__).startswith("4.")


def checkpointing_is_not_reentrant(module: ModuleType) -> Outcome:
    """Begin to train with reentrant checkpointing, by choice and by default: a line, and another setting."""
    from transformers import TrainingArguments
    from transformers.utils import generic

    trainer_class = class_with_steps(module)
    if trainer_class is None or any(base.__module__.startswith("trl.") for base in trainer_class.__mro__[1:]):
        return absent("this module has no trainer, one with a loop of its own, or one with a base in TRL")
    if not hasattr(generic, "OutputRecorder") and _is_reentrant_by_default():
        return absent("the layers of this transformers return the logits of their routers")
    changed = 0
    for chosen in (None, {"use_reentrant": True}):
        args = default_arguments(TrainingArguments, process_index=0, precompute_ref_log_probs=False)
        args.gradient_checkpointing, args.gradient_checkpointing_kwargs = True, chosen
        config = SimpleNamespace(output_router_logits=True, router_aux_loss_coef=0.5)
        trainer = stub_trainer(
            trainer_class,
            args,
            model=SimpleNamespace(config=config),
            is_in_train=True,
            train_dataset=[1],
            data_collator=list,
            _train_batch_size=1,
            _get_train_sampler=lambda *args: None,
            _get_collator_with_removed_columns=lambda collator, description: collator,
        )
        trainer.accelerator.prepare = lambda loader: loader
        with recorded_warnings() as lines:
            trainer.get_train_dataloader()
        changed += len(lines) + (args.gradient_checkpointing_kwargs != chosen)
    return judge(changed, right=1 + _is_reentrant_by_default(), wrong=0)
