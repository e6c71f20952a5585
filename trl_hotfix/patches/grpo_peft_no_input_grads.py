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
    settings = _settings(module, {"use_reentrant": True})
    prepare_peft_model = getattr(module, "prepare_peft_model", None)
    if hasattr(module.GRPOTrainer, "_enable_gradient_checkpointing"):
        from peft import get_peft_model

        trainer = stub_trainer(module.GRPOTrainer, settings)
        model = trainer._enable_gradient_checkpointing(get_peft_model(_base(), _lora()), settings)
    elif prepare_peft_model is not None:
        model = prepare_peft_model(_base(), _lora(), settings)
    elif hasattr(module, "_ForwardRedirection") or hasattr(module, "disable_gradient_checkpointing"):
        return absent("this release looks after the inputs of an adapter where it wraps the model")
    else:
        return _of_new_trainers(module)
    return _judged(_gradients(model, {"use_reentrant": True}))


def _of_new_trainers(module: ModuleType) -> Outcome:
    """Compare the gradients with those of a trainer without checkpoints.

    Where these are right already, the output of the embeddings is to be left alone.
    """
    untouched = {
        "without checkpoints": _new_model(module, checkpointing=False),
        "not reentrant": _new_model(module, {"use_reentrant": False}),
        "full fine-tuning": _new_model(module, {"use_reentrant": True}, adapter=False),
    }
    if touched := [name for name, model in untouched.items() if _hooks(model)]:
        raise AssertionError(f"the embeddings have a hook: {touched}")
    expected = _gradients(untouched["without checkpoints"], None)
    outcomes = []
    for options in ({"use_reentrant": True}, {}, None):
        model = _new_model(module, options)
        gradients = _gradients(model, options or {"use_reentrant": True})
        outcomes.append(_judged(gradients))
        if any(gradient.any() and not gradient.allclose(expected[name]) for name, gradient in gradients.items()):
            raise AssertionError(f"with {options} the gradients are {gradients}, and without checkpoints {expected}")
        if len(_hooks(model)) > 1:
            raise AssertionError(f"with {options} the embeddings have several hooks")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers are not all alike: {outcomes}")
    return outcomes[0]


def _judged(gradients: dict[str, Any]) -> Outcome:
    reached = sum(bool(gradient.any()) for gradient in gradients.values())
    return judge(reached, right=4, wrong=2, adapters=len(gradients))


def _gradients(model: Any, checkpointing: dict[str, Any] | None) -> dict[str, Any]:
    """Return the gradients of the LoRA matrices, zeros for those that get none, of a model with fixed weights."""
    import torch

    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
    model.train()
    for number, weight in enumerate(model.parameters()):
        # LoRA starts one matrix of each pair at 0, which would give the other matrix no gradient either.
        weight.data = torch.sin(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
    tokens = torch.tensor([[2, 3, 4, 5, 6]])
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
        if "lora_" in name
    }


def _hooks(model: Any) -> Any:
    return model.get_input_embeddings()._forward_hooks


def _base() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=None, eos_token_id=1))


def _lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=1, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")


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

    tokenizer = SimpleNamespace(pad_token_id=0, eos_token_id=1)
    settings = _settings(module, options, checkpointing=checkpointing)
    # A self-test must not set the seed of the process.
    with shadowed(module, "set_seed", lambda *args, **kwargs: None):
        trainer: Any = Trainer(  # type: ignore[misc]
            _base(), [], args=settings, processing_class=tokenizer, peft_config=_lora() if adapter else None
        )
    return trainer.model
