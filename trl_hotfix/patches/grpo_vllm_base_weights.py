"""GRPO with adapters hands the weights of the base model to vLLM, without what was merged into them (TRL issue 2856).

TRL 0.15.1 (pull request 2873) unmerges the adapter after the weights are handed over. A wrapper cannot do that under
DeepSpeed ZeRO-3, where the weights are sharded again by then. It copies the weights that a merge changes at the point
where 0.15.0 takes its ``state_dict``, while they are merged: this is right with sharding and without. Only the main
process loads weights into vLLM, so only it copies them.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

from ..authoring import judge, shadowed
from ..model import Outcome
from ..testing import stub_grpo_trainer


def hand_over_copies_of_what_is_merged(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Let the ``state_dict`` of a ``PeftModel`` contain copies of the weights beneath its adapters."""
    from peft import PeftModel

    model = instance.accelerator.unwrap_model(instance.model)
    if not isinstance(model, PeftModel):
        # torch.compile keeps the original module in this attribute.
        model = getattr(model, "_orig_mod", model)
    if not isinstance(model, PeftModel) or not instance.accelerator.is_main_process:
        return wrapped(*args, **kwargs)
    state_dict = model.state_dict

    def state_dict_with_copies(*args: Any, **kwargs: Any) -> dict[str, Any]:
        weights = state_dict(*args, **kwargs)
        return {name: _copy(weight) if ".base_layer." in name else weight for name, weight in weights.items()}

    with shadowed(model, "state_dict", state_dict_with_copies):
        return wrapped(*args, **kwargs)


def _copy(weight: Any) -> Any:
    # A merge replaces a quantised weight by a new one instead of writing into it, so it needs no copy.
    return weight.to("cpu", copy=True) if weight.is_floating_point() else weight


def vllm_is_given_the_merged_weights(module: ModuleType) -> Outcome:
    """Read the weight that is handed over, where the base weight is 1 and its adapter adds 0.5."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(torch.nn.Linear(2, 2, bias=False))
    model = get_peft_model(base, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    for name, weight in model.named_parameters():
        torch.nn.init.constant_(weight, 0.5 if "lora_B" in name else 1.0)

    loaded: dict[str, float] = {}

    def load_weights(weights: Any) -> None:
        loaded.update({name: float(weight.mean()) for name, weight in weights})

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
    base_weight = float(model.base_model.model[0].base_layer.weight.detach().mean())
    if set(loaded) != {"0.weight"} or abs(base_weight - 1.0) > 1e-6 or "state_dict" in vars(model):
        raise AssertionError(f"vLLM was given {loaded}, and {base_weight} is left in the model")
    return judge(loaded["0.weight"], right=1.5, wrong=1.0, left_in_the_model=base_weight)
