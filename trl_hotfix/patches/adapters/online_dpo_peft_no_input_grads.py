"""Online DPO with adapters and gradient checkpointing: the input of the decoder needs no gradient.

``OnlineDPOTrainer``, and with it those of XPO and Nash-MD, wraps the model itself. Checkpointing is switched on only
later, in ``train()``, which does not take the adapter into account. TRL 0.22.0 prepares the model as the other trainers
do (``prepare_peft_model``), which makes the output of the embeddings require a gradient under reentrant checkpointing.
The wrapper does the same for a ``PeftModel`` only: in full fine-tuning the embeddings are trained.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, wrapper
from ...model import Outcome
from ...testing import (
    absent_if_reexported,
    as_tokenizer_of,
    base_and_lora,
    constructed,
    default_arguments,
    judge_adapters,
    single_process,
)


@wrapper
def let_the_inputs_need_a_gradient(call: Call) -> None:
    """Hook the embeddings beneath an adapter after ``__init__``, before ``train()`` switches checkpointing on."""
    from peft import PeftModel

    trainer = call.trainer
    call()
    checkpointing = trainer.args.gradient_checkpointing_kwargs or {}
    if (
        trainer.args.gradient_checkpointing
        and checkpointing.get("use_reentrant") is not False
        and isinstance(trainer.model, PeftModel)
    ):
        call.act()
        trainer.model.enable_input_require_grads()


def every_adapter_has_a_gradient(module: ModuleType) -> Outcome:
    """Train LoRA before and behind the decoder's output: two of four matrices are reached through a checkpoint.

    The gradients are those of a trainer without checkpoints. Where these are right already, the embeddings are left
    alone.
    """
    if outcome := absent_if_reexported(module, module.OnlineDPOTrainer.__init__):
        return outcome
    if "peft_config" not in inspect.signature(module.OnlineDPOTrainer.__init__).parameters:
        return absent("this release puts no adapter on the model")
    if hasattr(module, "prepare_peft_model"):
        return absent("this release looks after the inputs of an adapter where it wraps the model")
    return judge_adapters(partial(_new_model, module))


def _new_model(
    module: ModuleType, options: dict[str, Any] | None, *, checkpointing: bool = True, adapter: bool = True
) -> Any:
    """Return the model of a trainer whose own constructor has run."""
    import torch

    model, lora = base_and_lora()
    settings = default_arguments(module.OnlineDPOConfig, missing_eos_penalty=None, use_vllm=False)
    settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs = checkpointing, options
    with single_process(module):
        trainer = constructed(
            module.OnlineDPOTrainer,
            model=model,
            # 0.11 has no judge yet.
            reward_model=torch.nn.Identity(),
            args=settings,
            train_dataset=_Rows(),
            eval_dataset=_Rows(),
            **as_tokenizer_of(module.OnlineDPOTrainer, SimpleNamespace(pad_token_id=0, eos_token_id=1)),
            peft_config=lora if adapter else None,
        )
    return trainer.model


class _Rows:
    """A dataset that stays as it is. 0.11 tokenises both."""

    def map(self, *args: Any, **kwargs: Any) -> _Rows:
        return self
