"""GRPO with adapters and gradient checkpointing: what goes into the decoder needs no gradient.

A reentrant checkpoint (torch's default, and transformers' before 5) gives its weights a gradient only if its input
needs one. Under an adapter the embeddings are frozen, so theirs does not. ``GRPOTrainer`` wraps the model itself, and
checkpointing is switched on only in ``train()``, where nobody knows of the adapter any more. With LoRA in the decoder
layers alone, the first backward pass raises ``RuntimeError`` (element 0 of tensors does not require grad). With a
trainable weight behind the decoder too (LoRA on ``lm_head``, or ``modules_to_save``) nothing is raised: that weight
trains, and no adapter in the decoder gets a gradient.

TRL 0.16.0 (pull request 2848) has the embeddings' output require a gradient if there is reentrant checkpointing. So
does this, for a ``PeftModel``; in full fine-tuning the embeddings are trained and need no help.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..stubs import default_arguments, stub_trainer


def let_the_inputs_need_a_gradient(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Once the trainer is made, before ``train()`` switches checkpointing on, hook the embeddings of an adapter."""
    from peft import PeftModel

    wrapped(*args, **kwargs)
    checkpointing = instance.args.gradient_checkpointing_kwargs or {}
    if (
        instance.args.gradient_checkpointing
        and checkpointing.get("use_reentrant") is not False
        and isinstance(instance.model, PeftModel)
    ):
        instance.model.enable_input_require_grads()


def every_adapter_has_a_gradient(module: ModuleType) -> Outcome:
    """LoRA before the decoder's output and behind it: four matrices, of which two are reached through a checkpoint."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    base = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    lora = LoraConfig(r=1, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    settings = default_arguments(module.GRPOConfig, per_device_train_batch_size=8, eval_strategy="no")
    settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs = True, {"use_reentrant": True}

    prepare_peft_model = getattr(module, "prepare_peft_model", None)
    if hasattr(module.GRPOTrainer, "_enable_gradient_checkpointing"):
        trainer = stub_trainer(module.GRPOTrainer, settings)
        model = trainer._enable_gradient_checkpointing(get_peft_model(base, lora), settings)
    elif prepare_peft_model is not None:
        settings.bf16 = False
        model = prepare_peft_model(base, lora, settings)
    elif hasattr(module, "_ForwardRedirection") or hasattr(module, "disable_gradient_checkpointing"):
        return absent("this release looks after the inputs of an adapter where it wraps the model")
    else:
        model = _model_of_a_new_trainer(module, base, lora, settings)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings.gradient_checkpointing_kwargs)
    model.train()
    adapters = {}
    for number, (name, weight) in enumerate(each for each in model.named_parameters() if "lora_" in each[0]):
        # Not the 0 that LoRA begins with: the other matrix of the pair would have no gradient either.
        weight.data = torch.cos(number + torch.arange(weight.numel())).reshape(weight.shape)
        adapters[name] = weight
    for number, weight in enumerate(model.parameters()):
        if not weight.requires_grad:
            weight.data = torch.sin(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    reached = [name for name, weight in adapters.items() if weight.grad is not None and weight.grad.abs().sum() > 0]
    return judge(len(reached), right=4, wrong=2, adapters=len(adapters))


def _model_of_a_new_trainer(module: ModuleType, base: Any, lora: Any, settings: SimpleNamespace) -> Any:
    """The model as the real ``__init__`` of ``GRPOTrainer`` leaves it; transformers' own ``__init__`` makes nothing.

    Standing behind ``GRPOTrainer`` and before ``Trainer`` in the order of resolution, ``Made`` is its ``super()``.
    """

    class Made(module.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any, args: Any, **others: Any) -> None:
            self.model, self.args = model, args
            self.accelerator = SimpleNamespace(num_processes=1, is_main_process=True, device="cpu")

    class Trainer(module.GRPOTrainer, Made):  # type: ignore[misc, name-defined]
        pass

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    # The seed of the process is not ours to set.
    with shadowed(module, "set_seed", lambda *args, **kwargs: None):
        trainer: Any = Trainer(  # type: ignore[misc]
            base, [], args=settings, processing_class=tokenizer, peft_config=lora
        )
    return trainer.model
