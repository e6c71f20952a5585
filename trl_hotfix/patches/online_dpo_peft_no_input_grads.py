"""Online DPO with adapters and gradient checkpointing: the input of the decoder needs no gradient.

``OnlineDPOTrainer``, and with it those of XPO and Nash-MD, wraps the model itself. Checkpointing is switched on only
later, in ``train()``, which does not take the adapter into account. TRL 0.22.0 prepares the model as the other trainers
do (``prepare_peft_model``), which makes the output of the embeddings require a gradient under reentrant checkpointing.
The wrapper does the same for a ``PeftModel`` only: in full fine-tuning the embeddings are trained.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import absent, act, judge
from ..model import Outcome
from ..testing import absent_if_reexported, constructed, default_arguments, single_process


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
    untouched = {
        "without checkpoints": _new_model(module, None, checkpointing=False),
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
        reached = [name for name, gradient in gradients.items() if gradient.any()]
        outcomes.append(judge(len(reached), right=4, wrong=2, adapters=len(gradients)))
        if any(not gradients[name].allclose(expected[name]) for name in reached):
            raise AssertionError(f"with {options} the gradients are {gradients}, and without checkpoints {expected}")
        if len(_hooks(model)) > 1:
            raise AssertionError(f"with {options} the embeddings have several hooks")
    if len({outcome.verdict for outcome in outcomes}) != 1:
        raise AssertionError(f"the trainers are not all alike: {outcomes}")
    return outcomes[0]


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


def _new_model(
    module: ModuleType, options: dict[str, Any] | None, *, checkpointing: bool = True, adapter: bool = True
) -> Any:
    """Return the model of a trainer whose own constructor has run."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 4, "max_position_embeddings": 8}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, pad_token_id=0, bos_token_id=None, eos_token_id=1))
    lora = LoraConfig(r=1, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    settings = default_arguments(module.OnlineDPOConfig, missing_eos_penalty=None, use_vllm=False)
    settings.gradient_checkpointing, settings.gradient_checkpointing_kwargs = checkpointing, options
    names = inspect.signature(module.OnlineDPOTrainer.__init__).parameters
    tokenizer = "processing_class" if "processing_class" in names else "tokenizer"
    with single_process(module):
        trainer = constructed(
            module.OnlineDPOTrainer,
            model=model,
            # 0.11 has no judge yet.
            reward_model=torch.nn.Identity(),
            args=settings,
            train_dataset=_Rows(),
            eval_dataset=_Rows(),
            **{tokenizer: SimpleNamespace(pad_token_id=0, eos_token_id=1)},
            peft_config=lora if adapter else None,
        )
    return trainer.model


class _Rows:
    """A dataset that stays as it is. 0.11 tokenises both."""

    def map(self, *args: Any, **kwargs: Any) -> _Rows:
        return self
