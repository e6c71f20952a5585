"""GRPO with adapters and gradient checkpointing: the input of the decoder needs no gradient, so its adapters get none.

``GRPOTrainer`` wraps the model itself, and checkpointing is switched on only later, in ``train()``, which does not take
the adapter into account. TRL 0.16.0 (pull request 2848) makes the output of the embeddings require a gradient under
reentrant checkpointing. The wrapper does the same for a ``PeftModel`` only: in full fine-tuning the embeddings are
trained, so their output requires a gradient anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, judge, shadowed
from ..model import Outcome
from ..testing import default_arguments, stub_trainer


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
    for number, (name, weight) in enumerate(pair for pair in model.named_parameters() if "lora_" in pair[0]):
        # LoRA starts one matrix of each pair at 0, which would give the other matrix no gradient either.
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
    """Return the model after the real ``__init__`` of ``GRPOTrainer``, without that of transformers' ``Trainer``.

    ``Parent`` comes after ``GRPOTrainer`` and before ``Trainer`` in the method resolution order, so it is the
    ``super()`` of ``GRPOTrainer``.
    """

    class Parent(module.Trainer):  # type: ignore[misc, name-defined]
        def __init__(self, model: Any, args: Any, **kwargs: Any) -> None:
            self.model, self.args = model, args
            self.accelerator = SimpleNamespace(num_processes=1, is_main_process=True, device="cpu")

    class Trainer(module.GRPOTrainer, Parent):  # type: ignore[misc, name-defined]
        pass

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    # A self-test must not set the seed of the process.
    with shadowed(module, "set_seed", lambda *args, **kwargs: None):
        trainer: Any = Trainer(  # type: ignore[misc]
            base, [], args=settings, processing_class=tokenizer, peft_config=lora
        )
    return trainer.model
