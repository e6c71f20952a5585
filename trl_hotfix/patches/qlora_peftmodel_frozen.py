"""A quantised ``PeftModel`` that is handed to a trainer is frozen, adapters and all.

peft's ``prepare_model_for_kbit_training`` is meant for a model that has no adapter yet: it freezes every parameter.
Trainers call it for a ``PeftModel`` too: SFT from TRL 0.20.0 on; GRPO, RLOO, reward, PRM and online DPO from 0.22.0 on.
With gradient checkpointing (the default since 0.22.0) the embeddings' output needs a gradient, so the backward pass
finds something to do: the run goes to its end with ``grad_norm`` 0 and nothing learned (TRL issue 3926). Without it the
first step raises ``RuntimeError``.

TRL 0.23.1 (pull request 4081) leaves a ``PeftModel`` out. Here what was trainable before is trainable again afterwards,
by name: nothing else is unfrozen, neither a second adapter that was frozen nor the weights beneath ``modules_to_save``.
The rest of the preparation stays: checkpointing as asked for, and parameters that are not quantised in float32. With a
``peft_config`` the trainer makes a new adapter, which is trained; that call is not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, argument, judge
from ..model import Outcome


def keep_what_is_trained(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Make those parameters of a ``PeftModel`` trainable again that were so before it was prepared."""
    from peft import PeftModel

    model = argument(wrapped, args, kwargs, "model")
    if not isinstance(model, PeftModel) or argument(wrapped, args, kwargs, "peft_config") is not None:
        return wrapped(*args, **kwargs)
    trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
    model = wrapped(*args, **kwargs)
    for name, weight in model.named_parameters():
        if name in trained and not weight.requires_grad:
            weight.requires_grad_(True)
    return model


def adapter_of_a_quantised_model_is_trained(module: ModuleType) -> Outcome:
    """Of two adapters on a model that says it is loaded in 4 bits, the one that was trained before is trained."""
    import dataclasses

    import torch
    from peft import LoraConfig, get_peft_model

    class Base(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

        # What transformers' models have for checkpointing.
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
    # Not before: peft would look for bitsandbytes.
    model.base_model.model.is_loaded_in_4bit = True
    before = {name for name, weight in model.named_parameters() if weight.requires_grad}
    if len(before) != 4 or any(".ref." in name for name in before):
        raise AssertionError(f"peft trains {sorted(before)}")
    # The method reads nothing of its trainer.
    trainer = getattr(module, "SFTTrainer", None)
    prepare = module.prepare_peft_model if trainer is None else object.__new__(trainer)._prepare_peft_model
    try:
        prepared = prepare(model, None, Arguments())
    except ValueError as error:
        if "Expected PeftConfig object" not in str(error):
            raise
        return absent("this release prepares no PeftModel that it is handed")
    after = {name for name, weight in prepared.named_parameters() if weight.requires_grad}
    if not after <= before:
        raise AssertionError(f"{sorted(after - before)} was not trained before")
    return judge(len(after), right=4, wrong=0, trained_before=len(before))
