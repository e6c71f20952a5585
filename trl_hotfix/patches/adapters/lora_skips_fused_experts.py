"""transformers 5 keeps the experts of a layer in one parameter, and LoRA's ``target_modules`` find modules.

In transformers 4 each expert had linear layers of its own, which ``target_modules="all-linear"`` and names such as
``up_proj`` found. In transformers 5 these find the attention, the router and shared experts, and no routed expert. PEFT
says nothing. From 0.19 on PEFT makes ``target_parameters`` of them for some models, such as Mixtral and Qwen3-MoE, and
not for others, such as Qwen2-MoE and Phi-MoE.

``create_optimizer`` comes before the first batch in each trainer that has transformers' loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, judge, wrapper
from ...model import Outcome
from ...testing import recorded_warnings, stub_trainer

_log = logging.getLogger("trl_hotfix")
_is_first_warning = Once()
_OF_EXPERTS = frozenset(("gate_proj", "up_proj", "down_proj", "gate_up_proj", "w1", "w2", "w3"))
"""The names that the linear layers of experts have in transformers 4."""


@wrapper
def warn_of_experts_without_adapter(call: Call) -> Any:
    """Warn once, on the main process, of experts that LoRA's ``target_modules`` ask for and do not find."""
    trainer = call.trainer
    skipped = sorted(_skipped(trainer.model))
    if skipped and _is_first_warning(trainer):
        call.act()
        if trainer.accelerator.is_main_process:
            names = {".".join(name.split(".")[-3:]) for name in skipped}
            _log.warning(
                "%s: %d tensors of experts have no adapter, such as %s. LoRA's target_modules ask for linear layers, "
                "and transformers 5 keeps the experts of a layer in one parameter. Only the other layers are trained. "
                "To train the experts: LoraConfig(target_parameters=%s)",
                type(trainer).__name__,
                len(skipped),
                skipped[0],
                sorted(names),
            )
    return call()


def _skipped(model: Any) -> Iterator[str]:
    """Give the names of fused experts' parameters without LoRA, if an adapter asks for them or for all layers."""
    if not hasattr(model, "get_base_model"):
        return
    from peft.tuners.lora import LoraLayer
    from peft.utils.other import ModulesToSaveWrapper
    from torch import nn

    base = model.get_base_model()
    adapted = [module for module in base.modules() if isinstance(module, LoraLayer)]
    # "all-linear" leaves the head out, and what is trained as a whole.
    whole = [module for module in base.modules() if isinstance(module, ModulesToSaveWrapper)]
    head = [base.lm_head] if hasattr(base, "lm_head") else []
    beneath = {id(inner) for module in [*adapted, *whole, *head] for inner in module.modules()}
    rest = [(name, module) for name, module in base.named_modules() if id(module) not in beneath]
    targets = [getattr(config, "target_modules", None) or () for config in model.peft_config.values()]
    names = {
        name.rpartition(".")[2] for of_adapter in targets if not isinstance(of_adapter, str) for name in of_adapter
    }
    named = not names.isdisjoint(_OF_EXPERTS)
    if adapted and (named or not any(isinstance(module, nn.Linear) for _, module in rest)):
        for name, module in rest:
            if "expert" in type(module).__name__.lower() or "moe" in type(module).__name__.lower():
                fused = (each for each, value in module.named_parameters(recurse=False) if value.ndim == 3)
                yield from (f"{name}.{each}" for each in fused)


def skipped_experts_are_reported(module: ModuleType) -> Outcome:
    """Begin to train LoRA that asks for the experts and misses them: one line says so, or none."""
    import torch
    from peft import LoraConfig, get_peft_model

    class Experts(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 2, 2))

    model = torch.nn.Module()
    model.q_proj, model.experts = torch.nn.Linear(2, 2), Experts()
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj", "up_proj", "gate_up_proj"]))
    trainer_class = getattr(module, "_BaseTrainer", None) or module.BaseTrainer
    trainer = stub_trainer(trainer_class, SimpleNamespace(), model=adapted, optimizer="made by the user")
    with recorded_warnings() as lines:
        trainer.create_optimizer()
    return judge(sum("have no adapter" in line for line in lines), right=1, wrong=0)
