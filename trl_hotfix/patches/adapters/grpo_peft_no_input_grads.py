"""Adapters under gradient checkpointing: the input of the decoder needs no gradient, so its adapters get none.

The trainers of GRPO and of online DPO, and with it those of XPO and Nash-MD, wrap the model themselves. Checkpointing
is switched on only later, in ``train()``, which ignores the adapter. TRL 0.16.0 (pull request 2848) makes the output of
the embeddings require a gradient in GRPO, under reentrant checkpointing. TRL 0.22.0 does it in online DPO
(``prepare_peft_model``). The wrapper does the same for a ``PeftModel`` only: in full fine-tuning the embeddings are
trained, so their output requires a gradient anyway.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    absent_if_reexported,
    as_tokenizer_of,
    base_for_adapters,
    constructed,
    default_arguments,
    single_process,
    stub_trainer,
    trainer_and_config,
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
    """Differentiate by the first matrix of LoRA in a checkpoint behind the embeddings. All weights are 1."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.checkpoint import checkpoint

    trainer_class, config_class = trainer_and_config(module, "GRPO", "OnlineDPO")
    if outcome := absent_if_reexported(module, trainer_class.__init__):
        return outcome
    if "peft_config" not in inspect.signature(trainer_class.__init__).parameters:
        return absent("this release puts no adapter on the model")
    base, lora = base_for_adapters(), LoraConfig(r=1, lora_alpha=1, target_modules=["q_proj"])
    base.get_input_embeddings, base.gradient_checkpointing_enable = lambda: base.embed_tokens, lambda **options: None
    settings = default_arguments(
        config_class,
        per_device_train_batch_size=8,
        eval_strategy="no",
        bf16=False,
        missing_eos_penalty=None,
        use_vllm=False,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": True},
    )
    if hasattr(trainer_class, "_enable_gradient_checkpointing"):
        model = stub_trainer(trainer_class, settings)._enable_gradient_checkpointing(
            get_peft_model(base, lora), settings
        )
    elif hasattr(module, "prepare_peft_model"):
        model = module.prepare_peft_model(base, lora, settings)
    elif hasattr(module, "_ForwardRedirection") or hasattr(module, "disable_gradient_checkpointing"):
        return absent("this release looks after the inputs of an adapter where it wraps the model")
    else:
        model = _wrapped(module, trainer_class, model=base, args=settings, peft_config=lora)
    for weight in model.parameters():
        weight.data.fill_(1)
    states = checkpoint(base.self_attn.q_proj, model.get_input_embeddings()(torch.tensor([2])), use_reentrant=True)
    # Something behind the decoder is trained too, or the backward pass would fail.
    (states.sum() + torch.zeros((), requires_grad=True)).backward()
    gradient = base.self_attn.q_proj.lora_A.default.weight.grad
    return judge(0.0 if gradient is None else float(gradient.sum()), right=16.0, wrong=0.0)


def _wrapped(module: ModuleType, trainer_class: Any, **arguments: Any) -> Any:
    """Return the model of a trainer whose own constructor has run."""
    import torch

    rows: Any = SimpleNamespace(map=lambda *args, **kwargs: rows)  # 0.11 tokenises them.
    tokenizer = as_tokenizer_of(trainer_class, SimpleNamespace(pad_token_id=0, eos_token_id=1))
    rewards = {"reward_funcs": []} if hasattr(module, "GRPOTrainer") else {"reward_model": torch.nn.Identity()}
    # A self-test must not set the seed of the process.
    with single_process(module), shadowed(module, "set_seed", lambda *args, **kwargs: None):
        return constructed(trainer_class, train_dataset=rows, **arguments, **tokenizer, **rewards).model
