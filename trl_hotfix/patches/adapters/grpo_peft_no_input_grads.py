"""GRPO with adapters and gradient checkpointing: the input of the decoder needs no gradient, so its adapters get none.

``GRPOTrainer`` wraps the model itself, and checkpointing is switched on only later, in ``train()``, which does not take
the adapter into account. TRL 0.16.0 (pull request 2848) makes the output of the embeddings require a gradient under
reentrant checkpointing. The wrapper does the same for a ``PeftModel`` only: in full fine-tuning the embeddings are
trained, so their output requires a gradient anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, shadowed
from ...model import Outcome
from ...testing import (
    base_and_lora,
    default_arguments,
    judge_adapters,
    judge_gradients,
    lora_gradients,
    stub_trainer,
)


def let_the_inputs_need_a_gradient(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Hook the embeddings beneath an adapter after ``__init__``, before ``train()`` switches checkpointing on."""
    from peft import PeftModel

    wrapped(*args, **kwargs)
    checkpointing = instance.args.gradient_checkpointing_kwargs or {}
    if (
        instance.args.gradient_checkpointing
        and checkpointing.get("use_reentrant") is not False
        and isinstance(instance.model, PeftModel)
    ):
        act()
        instance.model.enable_input_require_grads()


def every_adapter_has_a_gradient(module: ModuleType) -> Outcome:
    """Train LoRA before and behind the decoder's output: two of four matrices are reached through a checkpoint."""
    settings = _settings(module, {"use_reentrant": True})
    prepare_peft_model = getattr(module, "prepare_peft_model", None)
    if hasattr(module.GRPOTrainer, "_enable_gradient_checkpointing"):
        from peft import get_peft_model

        trainer = stub_trainer(module.GRPOTrainer, settings)
        model = trainer._enable_gradient_checkpointing(get_peft_model(*base_and_lora()), settings)
    elif prepare_peft_model is not None:
        model = prepare_peft_model(*base_and_lora(), settings)
    elif hasattr(module, "_ForwardRedirection") or hasattr(module, "disable_gradient_checkpointing"):
        return absent("this release looks after the inputs of an adapter where it wraps the model")
    else:
        return judge_adapters(partial(_new_model, module))
    return judge_gradients(lora_gradients(model, {"use_reentrant": True}))


def _settings(module: ModuleType, options: dict[str, Any] | None, *, checkpointing: bool = True) -> SimpleNamespace:
    settings = default_arguments(module.GRPOConfig, per_device_train_batch_size=8, eval_strategy="no", bf16=False)
    settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs = checkpointing, options
    return settings


def _new_model(
    module: ModuleType, options: dict[str, Any] | None = None, *, checkpointing: bool = True, adapter: bool = True
) -> Any:
    """Return the model after the real ``__init__`` of ``GRPOTrainer``, without that of transformers' ``Trainer``.

    ``Parent`` comes after ``GRPOTrainer`` and before ``Trainer`` in the method resolution order, so it is the
    ``super()`` of ``GRPOTrainer``.
    """

    class Parent(module.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
            self.model, self.args = model, args
            self.is_deepspeed_enabled = False
            self.accelerator = SimpleNamespace(
                num_processes=1, is_main_process=True, device="cpu", prepare_model=lambda model, **kwargs: model
            )

    class Trainer(module.GRPOTrainer, Parent):  # type: ignore[misc, name-defined]
        pass

    tokenizer, (model, lora) = SimpleNamespace(pad_token_id=0, eos_token_id=1), base_and_lora()
    settings = _settings(module, options, checkpointing=checkpointing)
    # A self-test must not set the seed of the process.
    with shadowed(module, "set_seed", lambda *args, **kwargs: None):
        trainer: Any = Trainer(  # type: ignore[misc]
            model, [], args=settings, processing_class=tokenizer, peft_config=lora if adapter else None
        )
    return trainer.model
