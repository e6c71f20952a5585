"""GRPO with adapters and vLLM: every completion is sampled from the base model.

``GRPOTrainer._move_model_to_vllm`` of TRL 0.15.0 merges the adapter, takes the ``state_dict`` and unmerges again before
it hands the weights over. A ``state_dict`` shares its memory with the model, so what vLLM is given is the base model,
at every step. The policy that is trained never generates: training goes off-policy further with each step, and what
it learns is never seen (TRL issue 2856).

TRL 0.15.1 (pull request 2873) unmerges after the weights are handed over. That cannot be had from outside under
DeepSpeed ZeRO-3, where the weights are sharded again by then. Here the weights that a merge changes are copied while
they are merged, where 0.15.0 takes its ``state_dict``: right with sharding and without. The copies are in the memory of
the host and of the main process only, which is the one that loads them; they are gone when the method returns.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import judge, shadowed
from ..model import Outcome
from ..stubs import stub_grpo_trainer


def hand_over_copies_of_what_is_merged(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The ``state_dict`` of a ``PeftModel`` has copies of the weights beneath its adapters."""
    from peft import PeftModel

    model = instance.accelerator.unwrap_model(instance.model)
    if not isinstance(model, PeftModel):
        # What torch.compile makes of a module has the module here.
        model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PeftModel) or not instance.accelerator.is_main_process:
        return wrapped(*args, **kwargs)
    shared = model.state_dict

    def copied(*args: Any, **kwargs: Any) -> dict[str, Any]:
        every = shared(*args, **kwargs)
        return {name: _copy(weight) if ".base_layer." in name else weight for name, weight in every.items()}

    with shadowed(model, "state_dict", copied):
        return wrapped(*args, **kwargs)


def _copy(weight: Any) -> Any:
    # A merge replaces a quantised weight by another one, it does not write into it.
    return weight.to("cpu", copy=True) if weight.is_floating_point() else weight


def vllm_is_given_the_merged_weights(module: ModuleType) -> Outcome:
    """A weight of 1 beneath an adapter that adds 0.5: what is in the weight that is handed over?"""
    import torch
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    model = get_peft_model(base, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    for name, weight in model.named_parameters():
        torch.nn.init.constant_(weight, 0.5 if "lora_B" in name else 1.0)

    given: dict[str, float] = {}

    def load_weights(weights: Any) -> None:
        given.update({name: float(weight.mean()) for name, weight in weights})

    runner = SimpleNamespace(model=SimpleNamespace(load_weights=load_weights))
    worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    trainer = stub_grpo_trainer(
        module,
        use_vllm=True,
        vllm_mode="server",
        llm=SimpleNamespace(llm_engine=SimpleNamespace(model_executor=worker)),
        # From 0.16.0 on vLLM is another process.
        vllm_client=SimpleNamespace(
            update_named_param=lambda name, weight: load_weights([(name, weight)]), reset_prefix_cache=lambda: None
        ),
    )
    trainer.model, trainer.is_fsdp_enabled = model, False
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    trainer._move_model_to_vllm()
    left = float(model.base_model.model[0].base_layer.weight.detach().mean())
    if set(given) != {"0.weight"} or abs(left - 1.0) > 1e-6 or "state_dict" in vars(model):
        raise AssertionError(f"vLLM was given {given}, and {left} is left in the model")
    return judge(given["0.weight"], right=1.5, wrong=1.0, left_in_the_model=left)
