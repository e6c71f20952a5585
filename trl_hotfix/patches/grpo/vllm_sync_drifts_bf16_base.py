"""Every update of vLLM's weights rounds the base model: the adapter is added to it in place and subtracted again.

In half precision ``w + delta - delta`` is not ``w``. TRL's method merges all layers, hands all parameters over, and
unmerges them. The wrapper lets it merge nothing, and merges the layer of a parameter in a copy at the point where
TRL's method reads it. vLLM is given the same numbers, and no more than a copy of one layer lies in memory. A merge of
DeepSpeed ZeRO-3's gathered weights is thrown away when they are sharded again, so nothing drifts there. With FSDP,
TRL's method goes through the modules itself.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_vllm, quick_is_peft_model, stub_trainer

Layers = dict[int, list[Any]]
"""The layers with an adapter, by the ids of the weights beneath them."""

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


@wrapper
def merge_one_by_one(call: Call) -> Any:
    """Let the model's parameters be merged as they are read, and its weights in half precision be left as they are."""
    model, accelerator = call.trainer.model, call.trainer.accelerator
    layers = _layers_in_half_precision(model)
    deepspeed_plugin = accelerator.state.deepspeed_plugin
    if not layers or (deepspeed_plugin is not None and deepspeed_plugin.zero_stage == 3):
        return call()
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        if _first_warning(call.trainer):
            _log.warning("with FSDP, the base model of an adapter still drifts with every update of vLLM's weights")
        return call()
    named_parameters, state_dict = model.named_parameters, model.state_dict
    with ExitStack() as stack:

        def do_nothing(*args: Any, **kwargs: Any) -> None: ...

        def parameters(*args: Any, **kwargs: Any) -> Any:
            merged = _one_by_one(layers, named_parameters(*args, **kwargs))
            # An error of vLLM would keep it, and with it the merged weight of the model.
            stack.callback(merged.close)
            return merged

        def state(*args: Any, **kwargs: Any) -> dict[str, Any]:
            # 0.15 reads the weights so, and its main process alone hands them over.
            weights: dict[str, Any] = state_dict(*args, **kwargs)
            if accelerator.is_main_process:
                weights |= {name: weight.data.to("cpu") for name, weight in parameters() if id(weight) in layers}
            return weights

        substitutes = {"merge_adapter": do_nothing, "unmerge_adapter": do_nothing}
        for name, substitute in {**substitutes, "named_parameters": parameters, "state_dict": state}.items():
            stack.enter_context(shadowed(model, name, substitute))
        return call()


def _layers_in_half_precision(model: Any) -> Layers:
    """Return the layers of a ``PeftModel`` that has weights in half precision, and none that are quantised."""
    import torch
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer

    half, layers, types = {torch.float16, torch.bfloat16}, Layers(), set()
    for layer in model.modules() if isinstance(model, PeftModel) else ():
        if isinstance(layer, BaseTunerLayer):
            weights = list(layer.get_base_layer().parameters())
            # Some quantised layers have no parameters.
            types |= {weight.dtype for weight in weights} or {None}
            for weight in weights:
                layers.setdefault(id(weight), []).append(layer)
    return layers if types & half and not types - half - {torch.float32} else {}


def _one_by_one(layers: Layers, parameters: Iterable[tuple[str, Any]]) -> Generator[tuple[str, Any], None, None]:
    for name, parameter in parameters:
        with _merged(layers.get(id(parameter), ())):
            yield name, parameter


@contextmanager
def _merged(layers: Iterable[Any]) -> Iterator[None]:
    """Merge these layers, which are of one base layer, in copies of its weights, and put the weights back."""
    weights = {id(weight): weight for layer in layers for weight in layer.get_base_layer().parameters()}
    before = {key: weight.data for key, weight in weights.items()}
    try:
        for weight in weights.values():
            weight.data = weight.data.clone()
        for layer in layers:
            layer.merge()
        yield
    finally:
        for layer in layers:
            layer.merged_adapters.clear()
        for key, weight in weights.items():
            weight.data = before[key]


_METHODS = {
    "GRPOTrainer": "_move_model_to_vllm",
    "RLOOTrainer": "_move_model_to_vllm",
    "OnlineDPOTrainer": "_move_model_to_vllm",
    "VLLMGeneration": "sync_weights",
}
"""The classes that hand weights over, and their methods."""


def base_model_stays(module: ModuleType) -> Outcome:
    """Hand a weight over that is 1 in bf16, with an adapter that adds 3 / 1024: how far is it moved?

    1 + 3 / 1024 is rounded to 1, and 1 - 3 / 1024 to 1 - 1 / 256.
    """
    import torch
    from peft import LoraConfig, get_peft_model

    holder = class_with_vllm(module, _METHODS, "this module hands no weights over to vLLM")
    if isinstance(holder, Outcome):
        return holder
    base: Any = torch.nn.Sequential(torch.nn.Linear(1, 1, bias=False)).bfloat16()
    model = get_peft_model(base, LoraConfig(r=1, lora_alpha=1, target_modules=["0"]))
    for name, weight in model.named_parameters():
        weight.data.fill_(3 / 1024 if "lora_B" in name else 1.0)
    runner = SimpleNamespace(model=SimpleNamespace(load_weights=list))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
    # 0.17 knows no other vLLM than a server.
    client = SimpleNamespace(update_named_param=lambda name, weight: None, reset_prefix_cache=lambda: None)
    instance = stub_trainer(
        holder,
        SimpleNamespace(report_to=[], ds3_gather_for_generation=True),
        model=model,
        mode="colocate",
        vllm_mode="colocate",
        is_fsdp_enabled=False,
        enable_sleep_mode=False,
        vllm_client=client,
        llm=SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None),
        state=SimpleNamespace(global_step=0),
    )
    instance.accelerator.state = SimpleNamespace(deepspeed_plugin=None)
    if hasattr(module, "DistributedBackend"):
        instance._dist = module.DistributedBackend(instance.accelerator)
    with quick_is_peft_model(module):
        getattr(instance, _METHODS[holder.__name__])()
    (weight,) = (weight for name, weight in model.named_parameters() if "lora" not in name)
    return judge(1 - weight.item(), right=0.0, wrong=1 / 256)
