"""A quantised ``PeftModel`` that is passed to a trainer is frozen, adapters included.

Trainers call peft's ``prepare_model_for_kbit_training``, which is meant for a model without adapters and freezes every
parameter, for a ``PeftModel`` too. With gradient checkpointing the output of the embeddings requires a gradient, so the
backward pass does not fail, although no parameter is trained.

TRL 0.23.1 (pull request 4081) does not prepare a ``PeftModel``. The wrapper makes the parameters that were trainable
before trainable again, by name, and so unfreezes neither a second, frozen adapter nor the weights beneath
``modules_to_save``.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from ...authoring import Call, absent_on, judge, wrapper
from ...model import Outcome


@wrapper
def keep_what_is_trained(call: Call) -> Any:
    """Prepare a ``PeftModel``, and make the parameters that were trainable before trainable again."""
    from peft import PeftModel

    model = call["model"]
    if not isinstance(model, PeftModel) or call["peft_config"] is not None:
        return call()
    trainable = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model = call()
    for name, weight in model.named_parameters():
        if name in trainable and not weight.requires_grad:
            weight.requires_grad_(True)
            call.act()
    return model


@absent_on(ValueError, "Expected PeftConfig object", "this release prepares no PeftModel that it is handed")
def adapter_of_a_quantised_model_is_trained(module: ModuleType) -> Outcome:
    """Count the matrices of an adapter that are trained after its model, marked as loaded in 4 bits, is prepared."""
    import dataclasses

    import torch
    from peft import LoraConfig, get_peft_model

    class Base(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(2, 2)

        # Methods of transformers' models that gradient checkpointing calls.
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None) -> None: ...

        def enable_input_require_grads(self) -> None: ...

    @dataclasses.dataclass
    class Arguments:
        bf16: bool = False
        gradient_checkpointing: bool = True
        gradient_checkpointing_kwargs: Any = None

    model = get_peft_model(Base(), LoraConfig(r=1, target_modules=["inner"]))
    # If the flag were set earlier, peft would look for bitsandbytes.
    model.base_model.model.is_loaded_in_4bit = True
    trainer = getattr(module, "SFTTrainer", None)
    prepare = module.prepare_peft_model if trainer is None else object.__new__(trainer)._prepare_peft_model
    prepared = prepare(model, None, Arguments())
    return judge(sum(weight.requires_grad for weight in prepared.parameters()), right=2, wrong=0)
