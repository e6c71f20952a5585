"""Every update of vLLM's weights rounds the base model: the adapter is added to it in place and subtracted again.

In half precision ``w + delta - delta`` is not ``w``. TRL's method merges all layers, hands all parameters over, and
unmerges them. The wrapper lets it merge nothing, and merges the layer of a parameter in a copy at the point where
TRL's method reads it. vLLM is given the same numbers, and no more than a copy of one layer lies in memory. A merge of
DeepSpeed ZeRO-3's gathered weights is thrown away when they are sharded again, so nothing drifts there. With FSDP,
TRL's method goes through the modules itself.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Once, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import class_with_vllm, quick_is_peft_model, recorded_warnings, stub_trainer

Layers = dict[int, list[Any]]
"""The layers with an adapter, by the ids of the weights beneath them."""

_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


def merge_one_by_one(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let the model's parameters be merged as they are read, and its weights in half precision be left as they are."""
    model, accelerator = instance.model, instance.accelerator
    layers = _layers_in_half_precision(model)
    deepspeed_plugin = accelerator.state.deepspeed_plugin
    if not layers or (deepspeed_plugin is not None and deepspeed_plugin.zero_stage == 3):
        return wrapped(*args, **kwargs)
    if getattr(accelerator.state, "fsdp_plugin", None) is not None:
        if _first_warning(instance):
            _log.warning("with FSDP, the base model of an adapter still drifts with every update of vLLM's weights")
        return wrapped(*args, **kwargs)
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
        return wrapped(*args, **kwargs)


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

SYNCS = 3


def base_model_stays(module: ModuleType) -> Outcome:
    """Hand the weights of an adapter that moves over three times, and look at the base model and at what vLLM is given.

    vLLM keeps what it is given and reads it after the method has returned, as a server that packs its tensors may. The
    base model must be as it was to the last bit, and vLLM be given it with the adapter added to it once.
    """
    holder = class_with_vllm(module, _METHODS, "this module hands no weights over to vLLM")
    if isinstance(holder, Outcome):
        return holder
    with quick_is_peft_model(module):
        return _judged(module, holder, _METHODS[holder.__name__])


def _judged(module: ModuleType, holder: Any, method: str) -> Outcome:
    server = _Case(module, holder, method, mode="server")
    outcome = server.judged()
    if outcome.verdict is Verdict.FIXED:
        colocate = _Case(module, holder, method, mode="colocate")
        other_rank = _Case(module, holder, method, mode="server", is_main_process=False)
        others = [case.judged() for case in (colocate, other_rank)]
        if any(other.verdict is not Verdict.FIXED for other in others):
            raise AssertionError(f"the base model does not always stay: {others}")
        for case in (server, colocate):
            case.fail()
        for settings in ({"dtype": "float32"}, {"adapter": False}):
            _Case(module, holder, method, mode="colocate", **settings).left_alone()
        server.left_to_deepspeed_and_fsdp()
        _quantised_is_left_alone()
        _adapters_of_one_module_are_merged()
    return outcome


class _Case:
    """An object that hands weights over, its model of three layers, two with an adapter, and what vLLM was given."""

    def __init__(
        self,
        module: ModuleType,
        holder: Any,
        method: str,
        *,
        mode: str,
        is_main_process: bool = True,
        dtype: str = "bfloat16",
        adapter: bool = True,
    ) -> None:
        import torch

        self.given: list[tuple[str, Any]] = []
        self.fails = False
        self.hands_over = mode == "colocate" or is_main_process
        self.model = _model(getattr(torch, dtype), adapter=adapter)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._take))
        engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
        client = SimpleNamespace(
            update_named_param=lambda name, weight: self._take([(name, weight)]),
            update_named_params=lambda metadata, weights: self._take(weights),
            weight_update=nullcontext,
            reset_prefix_cache=lambda: None,
        )
        self.instance = stub_trainer(
            holder,
            SimpleNamespace(report_to=[], ds3_gather_for_generation=True),
            model=self.model,
            mode=mode,
            vllm_mode=mode,
            is_fsdp_enabled=False,
            enable_sleep_mode=False,
            vllm_client=client,
            llm=SimpleNamespace(llm_engine=engine, reset_prefix_cache=lambda: None),
            state=SimpleNamespace(global_step=0),
            _weight_metadata=None,
        )
        self.instance.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)
        self.instance.accelerator.is_main_process = is_main_process
        if hasattr(module, "DistributedBackend"):
            self.instance._dist = module.DistributedBackend(self.instance.accelerator)
        self.hand_over = getattr(self.instance, method)

    def _take(self, weights: Iterable[tuple[str, Any]]) -> None:
        for name, weight in weights:
            self.given.append((name, weight))
            if self.fails and "0.weight" in name:
                raise InterruptedError

    def judged(self) -> Outcome:
        """Judge by how far the base model has moved after three times. It moves as the roundings add up."""
        import torch

        start = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        places = {name: weight.data_ptr() for name, weight in self.model.named_parameters()}
        for _ in range(SYNCS):
            self.given.clear()
            _move(self.model)
            with warnings.catch_warnings(record=True) as messages:
                # PEFT warns of a layer that is unmerged and has not been merged.
                warnings.simplefilter("always")
                self.hand_over()
            if any("unmerged" in str(message.message) for message in messages):
                raise AssertionError("layers are unmerged that were not merged")
            self.check_model()
            deltas = _deltas(self.model)
            right = {name: start[name].float().add(delta).to(torch.bfloat16) for name, delta in deltas.items()}
            if all(torch.equal(self.model.get_parameter(name), start[name]) for name in deltas):
                self.check_given(right, places)
        return judge(_moved(self.model, start), right=0.0, wrong=_drift())

    def check_model(self) -> None:
        """Check that nothing of a merge is left in the model."""
        names = {"merge_adapter", "unmerge_adapter", "named_parameters", "state_dict"} & set(vars(self.model))
        merged = [name for name, layer in self.model.named_modules() if getattr(layer, "merged", False)]
        if names or merged:
            raise AssertionError(f"the model is left with {names}, and with the merged layers {merged}")

    def check_given(self, right: dict[str, Any], places: dict[str, int]) -> None:
        """Compare what vLLM was given, by name. What has no adapter must not be copied."""
        import torch

        expected = {}
        for name, weight in self.model.named_parameters():
            if "lora" not in name:
                own = name.removeprefix("base_model.model.").replace(".base_layer", "")
                expected[own] = right.get(name, weight)
                if weight.data_ptr() != places[name]:
                    raise AssertionError(f"{name} lies at another place")
        given = dict(self.given)
        if list(given) != (list(expected) if self.hands_over else []):
            raise AssertionError(f"vLLM was given {list(given)}: expected {list(expected)}")
        for name, weight in given.items():
            if weight.dtype != expected[name].dtype or not torch.equal(weight, expected[name]):
                raise AssertionError(f"vLLM was given {name} as {weight}: expected {expected[name]}")
            if name.startswith("1.") and weight.data_ptr() != expected[name].data_ptr():
                raise AssertionError(f"{name} is copied, which has no adapter")

    def fail(self) -> None:
        """Let vLLM fail at a merged weight. The error, which is kept here, must not keep the weight merged."""
        before = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}
        self.fails = True
        try:
            self.hand_over()
        except InterruptedError as error:
            self.check_model()
            changed = [name for name, weight in self.model.named_parameters() if not weight.equal(before[name])]
            if changed:
                raise AssertionError(f"an error of vLLM leaves {changed} merged") from error
        else:
            raise AssertionError("an error of vLLM is lost")
        self.fails = False

    def left_alone(self) -> None:
        """Check that the model is as TRL left it while vLLM is given its weights."""
        take, shadows = self._take, set[str]()

        def look(weights: Iterable[tuple[str, Any]]) -> None:
            shadows.update({"merge_adapter", "named_parameters"} & set(vars(self.model)))
            take(weights)

        self.instance.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = look
        self.instance.vllm_client.update_named_param = lambda name, weight: look([(name, weight)])
        self.hand_over()
        if shadows or not self.given:
            raise AssertionError(f"a model that does not drift has {shadows} of ours, and hands {len(self.given)} over")

    def left_to_deepspeed_and_fsdp(self) -> None:
        """Check when the model is another one in TRL's method, and that FSDP is warned of, once for each object."""
        state = self.instance.accelerator.state

        def is_other() -> bool:
            return "merge_adapter" in vars(self.model)

        seen = {}
        with recorded_warnings() as messages:
            for name, plugins in {
                "zero 2": {"deepspeed_plugin": SimpleNamespace(zero_stage=2)},
                "zero 3": {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
                "fsdp": {"fsdp_plugin": SimpleNamespace(fsdp_version=2)},
                "fsdp again": {"fsdp_plugin": SimpleNamespace(fsdp_version=2)},
            }.items():
                vars(state).update({"deepspeed_plugin": None, "fsdp_plugin": None, **plugins})
                seen[name] = merge_one_by_one(is_other, self.instance, (), {})
        if seen != {"zero 2": True, "zero 3": False, "fsdp": False, "fsdp again": False} or len(messages) != 1:
            raise AssertionError(f"the model is another one with {seen}, and {messages} is said")
        del state.fsdp_plugin
        state.deepspeed_plugin = None
        if not merge_one_by_one(is_other, self.instance, (), {}):
            raise AssertionError("an accelerator without a plugin is taken for FSDP")


def _model(dtype: Any, *, adapter: bool) -> Any:
    """Return three layers, of which the first and the last have an adapter, with weights of all sizes."""
    import torch
    from peft import LoraConfig, get_peft_model

    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2, bias=False))
    model = model.to(dtype)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=["0", "2"], init_lora_weights=False))
    for number, weight in enumerate(model.parameters()):
        index = torch.arange(1.0, weight.numel() + 1)
        weight.data = torch.cos(number + index).reshape(weight.shape).to(weight.dtype)
    return model


def _move(model: Any) -> None:
    """Move the adapters, as an optimizer does."""
    for number, weight in enumerate(model.parameters()):
        if weight.requires_grad:
            weight.data += 0.3 * (number + weight.data.cos())


@functools.cache
def _drift() -> float:
    """Return how far the base model is moved by PEFT's own merge and unmerge, whose releases round differently."""
    import torch

    model = _model(torch.bfloat16, adapter=True)
    start = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    for _ in range(SYNCS):
        _move(model)
        model.merge_adapter()
        model.unmerge_adapter()
    return _moved(model, start)


def _moved(model: Any, start: dict[str, Any]) -> float:
    return max(float((model.get_parameter(name) - start[name]).abs().max()) for name in _deltas(model))


def _deltas(model: Any) -> dict[str, Any]:
    """Return what the adapters add to each weight, by the name of the weight."""
    return {
        f"{name}.base_layer.weight": (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach().float()
        for name, layer in model.named_modules()
        if hasattr(layer, "lora_A")
    }


def _quantised_is_left_alone() -> None:
    """Check that a model is left alone if a layer has whole numbers, or no parameters; not if it has fp32 or fp16."""
    import torch

    model = _model(torch.bfloat16, adapter=True)
    base = model.get_submodule("base_model.model.0").get_base_layer()
    weight = base.weight
    del base.bias
    for dtype in (torch.uint8, None, torch.float32, torch.float16):
        del base.weight
        if dtype is not None:
            base.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
        if bool(_layers_in_half_precision(model)) != (dtype in (torch.float32, torch.float16)):
            raise AssertionError(f"a model with {dtype} in a layer is not merged layer by layer, or should not be")
        if _layers_in_half_precision(model.base_model.model):
            raise AssertionError("adapters are merged without a PeftModel, where TRL merges none")
        base.weight = weight
    if not _layers_in_half_precision(_model(torch.float16, adapter=True)):
        raise AssertionError("a model in fp16 is not merged layer by layer")


def _adapters_of_one_module_are_merged() -> None:
    """Check a module of two parameters, each with an adapter of its own. PEFT knows that from 0.17 on."""
    import torch
    from peft import LoraConfig, get_peft_model

    if "target_parameters" not in {field.name for field in fields(LoraConfig)}:
        return

    class Experts(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.Parameter(torch.ones(2, *shape)) for shape in ((2, 3), (3, 2)))

    model: Any = torch.nn.Sequential(Experts()).to(torch.bfloat16)
    settings = {"target_modules": [], "target_parameters": ["0.up", "0.down"]}
    with warnings.catch_warnings():
        # PEFT does not know the module.
        warnings.simplefilter("ignore")
        model = get_peft_model(model, LoraConfig(r=1, init_lora_weights=False, **settings))
    for number, weight in enumerate(model.parameters()):
        weight.data = torch.cos(number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape).to(weight.dtype)
    expected = copy.deepcopy(model)
    expected.merge_adapter()
    given = _one_by_one(_layers_in_half_precision(model), model.named_parameters())
    differ = [name for name, weight in given if not weight.equal(expected.get_parameter(name))]
    if differ:
        raise AssertionError(f"vLLM is given others of {differ} than PEFT merges")
