"""A quantised ``PeftModel`` that is passed to a trainer is frozen, adapters included.

Trainers call peft's ``prepare_model_for_kbit_training``, which is meant for a model without adapters and freezes every
parameter, for a ``PeftModel`` too. With gradient checkpointing the output of the embeddings requires a gradient, so the
backward pass does not fail, although no parameter is trained.

TRL 0.23.1 (pull request 4081) does not prepare a ``PeftModel``. The wrapper makes the parameters that were trainable
before trainable again, by name, and so unfreezes neither a second, frozen adapter nor the weights beneath
``modules_to_save``.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, act, argument, judge
from ..model import Outcome


def keep_what_is_trained(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Prepare a ``PeftModel``, and make the parameters that were trainable before trainable again."""
    from peft import PeftModel

    model = argument(wrapped, args, kwargs, "model")
    if not isinstance(model, PeftModel) or argument(wrapped, args, kwargs, "peft_config") is not None:
        return wrapped(*args, **kwargs)
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model = wrapped(*args, **kwargs)
    for name, weight in model.named_parameters():
        if name in trainable and not weight.requires_grad:
            weight.requires_grad_(True)
            act()
    return model


def adapter_of_a_quantised_model_is_trained(module: ModuleType) -> Outcome:
    """Check that of two adapters on a model marked as loaded in 4 bits the trainable one stays trainable."""
    import dataclasses

    import torch
    from peft import LoraConfig, get_peft_model

    class Base(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        # Methods of transformers' models that gradient checkpointing calls.
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...
        def enable_input_require_grads(self) -> None: ...

    @dataclasses.dataclass
    class Arguments:
        bf16: bool = False
        gradient_checkpointing: bool = True
        gradient_checkpointing_kwargs: Any = None

    lora = LoraConfig(r=1, target_modules=["inner"], modules_to_save=["head"])
    model = get_peft_model(Base(), lora)
    model.add_adapter("ref", lora)
    model.set_adapter("default")
    # If the flag were set earlier, peft would look for bitsandbytes.
    model.base_model.model.is_loaded_in_4bit = True
    trainable_before = {name for name, weight in model.named_parameters() if weight.requires_grad}
    if len(trainable_before) != 4 or any(".ref." in name for name in trainable_before):
        raise AssertionError(f"peft trains {sorted(trainable_before)}")
    # The method reads nothing of its trainer.
    trainer = getattr(module, "SFTTrainer", None)
    prepare = module.prepare_peft_model if trainer is None else object.__new__(trainer)._prepare_peft_model
    try:
        prepared = prepare(model, None, Arguments())
    except ValueError as error:
        if "Expected PeftConfig object" not in str(error):
            raise
        return absent("this release prepares no PeftModel that it is handed")
    trainable_after = {name for name, weight in prepared.named_parameters() if weight.requires_grad}
    if not trainable_after <= trainable_before:
        raise AssertionError(f"{sorted(trainable_after - trainable_before)} was not trained before")
    return judge(len(trainable_after), right=4, wrong=0, trained_before=len(trainable_before))
