"""GRPO with adapters hands the weights of the base model to vLLM, without what was merged into them (TRL issue 2856).

TRL 0.15.1 (pull request 2873) unmerges the adapter after the weights are handed over. A wrapper cannot do that under
DeepSpeed ZeRO-3, where the weights are sharded again by then. It copies the weights that a merge changes at the point
where 0.15.0 takes its ``state_dict``, while they are merged: this is right with sharding and without. Only the main
process loads weights into vLLM, so only it copies them.
"""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import quick_is_peft_model, stub_grpo_trainer


@wrapper
def hand_over_copies_of_what_is_merged(call: Call) -> Any:
    """Let the ``state_dict`` of a ``PeftModel`` contain copies of the weights beneath its adapters."""
    from peft import PeftModel

    accelerator = call.trainer.accelerator
    model = accelerator.unwrap_model(call.trainer.model)
    # torch.compile keeps the original module under this name.
    model = model._modules.get("_orig_mod", model)
    if not isinstance(model, PeftModel) or not accelerator.is_main_process:
        return call()
    state_dict = model.state_dict

    def state_dict_with_copies(*args: Any, **kwargs: Any) -> dict[str, Any]:
        weights = state_dict(*args, **kwargs)
        return {name: _copy(weight) if ".base_layer." in name else weight for name, weight in weights.items()}

    with shadowed(model, "state_dict", state_dict_with_copies):
        return call()


def _copy(weight: Any) -> Any:
    # A merge replaces a quantised weight by a new one instead of writing into it, so it needs no copy.
    return weight.to("cpu", copy=True) if weight.is_floating_point() else weight


def vllm_is_given_the_merged_weights(module: ModuleType) -> Outcome:
    """Hand over one weight of 2 with an adapter that adds 3, and see what vLLM is given."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False))
    model = get_peft_model(base, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    values = {"base_layer": 2.0, "lora_A": 3.0, "lora_B": 1.0}
    for name, weight in model.named_parameters():
        weight.data.fill_(values[name.split(".")[3]])
    given: dict[str, float] = {}

    def load(weights: Any) -> None:
        given.update((name, float(weight)) for name, weight in weights)

    runner = SimpleNamespace(model=SimpleNamespace(load_weights=load))
    worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
    # From 0.16.0 on vLLM is another process.
    client = SimpleNamespace(
        update_named_param=lambda name, weight: load([(name, weight)]), reset_prefix_cache=lambda: None
    )
    trainer = stub_grpo_trainer(
        module,
        use_vllm=True,
        vllm_mode="server",
        llm=SimpleNamespace(llm_engine=SimpleNamespace(model_executor=worker)),
        vllm_client=client,
    )
    trainer.model, trainer.is_fsdp_enabled = model, False
    trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
    with quick_is_peft_model(module):
        trainer._move_model_to_vllm()
    return judge(given["0.weight"], right=5.0, wrong=2.0)
