"""The base model keeps every bit while vLLM is given its weights with the adapter added to them once."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from trl_hotfix.authoring import Call
from trl_hotfix.model import Outcome
from trl_hotfix.patches.grpo import vllm_sync_drifts_bf16_base as patch
from trl_hotfix.testing import class_with_vllm, stub_trainer

import tiny

ID = "vllm-sync-drifts-bf16-base"
MODULES = (
    "trl.trainer.grpo_trainer",
    "trl.trainer.rloo_trainer",
    "trl.trainer.online_dpo_trainer",
    "trl.experimental.online_dpo.online_dpo_trainer",
    "trl.generation.vllm_generation",
)
OWN = {"merge_adapter", "unmerge_adapter", "named_parameters", "state_dict"}
"""What the wrapper sets on the model for the time of a call."""


def holders() -> dict[str, tuple[Any, Any]]:
    """Return the modules and classes of this release that hand weights over."""
    found = {}
    for name in MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        holder = class_with_vllm(module, patch._METHODS, "")
        if not isinstance(holder, Outcome):
            found[holder.__name__] = (module, holder)
    return found


HOLDERS = holders()
"""By the name of the class."""


class Case:
    """An object that hands weights over, its model of three layers, two with an adapter, and what vLLM was given."""

    def __init__(
        self,
        holder: str,
        *,
        mode: str = "colocate",
        is_main_process: bool = True,
        dtype: Any = torch.bfloat16,
        adapter: bool = True,
    ) -> None:
        module, holder_class = HOLDERS[holder]
        self.given: list[tuple[str, Any]] = []
        self.shadows: set[str] = set()
        self.fails_at = ""
        self.hands_over = mode == "colocate" or is_main_process
        self.model = model_of(dtype, adapter=adapter)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self.take))
        engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
        client = SimpleNamespace(
            update_named_param=lambda name, weight: self.take([(name, weight)]),
            update_named_params=lambda metadata, weights: self.take(weights),
            weight_update=nullcontext,
            reset_prefix_cache=lambda: None,
        )
        self.instance = stub_trainer(
            holder_class,
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
        self.hand_over = getattr(self.instance, patch._METHODS[holder])

    def take(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Keep what vLLM is given, to be read after the call, as a server that packs its tensors may."""
        for name, weight in weights:
            self.shadows |= OWN & set(vars(self.model))
            self.given.append((name, weight))
            if self.fails_at and self.fails_at in name:
                raise InterruptedError

    def sync(self) -> None:
        self.given.clear()
        with warnings.catch_warnings():
            # PEFT warns of a layer that is unmerged and has not been merged.
            warnings.filterwarnings("error", message=".*unmerged.*")
            self.hand_over()

    def weights(self) -> dict[str, Any]:
        return {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def expected(self) -> dict[str, Any]:
        """Return what vLLM is to be given, by the name in the model without an adapter."""
        sums = {
            f"{name}.base_layer.weight": (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()
            for name, layer in self.model.named_modules()
            if hasattr(layer, "lora_A")
        }
        right = {}
        for name, weight in self.model.named_parameters():
            if "lora" not in name:
                merged = weight.float().add(sums[name].float()).to(weight.dtype) if name in sums else weight
                right[name.removeprefix("base_model.model.").replace(".base_layer", "")] = merged
        return right if self.hands_over else {}

    def assert_given(self) -> None:
        right = self.expected()
        assert [name for name, _ in self.given] == list(right)
        for name, weight in self.given:
            assert weight.dtype is right[name].dtype, name
            assert weight.equal(right[name]), name

    def assert_nothing_is_left(self, before: dict[str, Any]) -> None:
        """Assert that the model is as it was, and has nothing of a merge."""
        assert not OWN & set(vars(self.model))
        assert [name for name, layer in self.model.named_modules() if getattr(layer, "merged", False)] == []
        assert [name for name, weight in self.model.named_parameters() if not weight.equal(before[name])] == []


def model_of(dtype: Any = torch.bfloat16, *, adapter: bool = True) -> Any:
    """Return three layers, of which the first and the last have an adapter, with weights of all sizes."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3), torch.nn.Linear(3, 2, bias=False))
    model = model.to(dtype)
    if adapter:
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=2, target_modules=["0", "2"], init_lora_weights=False))
    fill(model)
    return model


def fill(model: Any) -> None:
    for number, weight in enumerate(model.parameters()):
        index = torch.arange(1.0, weight.numel() + 1)
        weight.data = torch.cos(number + index).reshape(weight.shape).to(weight.dtype)


def train(model: Any) -> None:
    """Move the adapters, as an optimizer does."""
    for number, weight in enumerate(model.parameters()):
        if weight.requires_grad:
            weight.data += 0.3 * (number + weight.data.cos())


every_holder = pytest.mark.parametrize("holder", HOLDERS)


@every_holder
@pytest.mark.parametrize(("mode", "is_main_process"), [("colocate", True), ("server", True), ("server", False)])
def test_the_base_model_stays_and_vllm_is_given_merged_weights(holder: str, mode: str, is_main_process: bool) -> None:
    case = Case(holder, mode=mode, is_main_process=is_main_process)
    for is_training in (True, False, True):
        train(case.model.train(is_training))
        before = case.weights()
        with tiny.counted(ID) as counts:
            case.sync()
            assert counts().acted == 1
        case.assert_nothing_is_left(before)
        case.assert_given()


@every_holder
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_half_precisions_are_merged_layer_by_layer(holder: str, dtype: Any) -> None:
    case = Case(holder, dtype=dtype)
    before = case.weights()
    case.sync()
    case.assert_nothing_is_left(before)
    case.assert_given()


@every_holder
def test_each_of_two_objects_keeps_its_base_model(holder: str) -> None:
    cases = [Case(holder), Case(holder, mode="server")]
    for case in cases + cases:
        train(case.model)
        before = case.weights()
        case.sync()
        case.assert_nothing_is_left(before)
        case.assert_given()


@every_holder
def test_a_layer_without_an_adapter_is_not_copied(holder: str) -> None:
    case = Case(holder)
    places = {name: weight.data_ptr() for name, weight in case.model.named_parameters()}
    case.sync()
    assert {name: weight.data_ptr() for name, weight in case.model.named_parameters()} == places
    copied = {name for name, weight in case.given if weight.data_ptr() not in places.values()}
    # A copy of a layer is one of its bias, too.
    assert {"0.weight", "2.weight"} <= copied <= {"0.weight", "0.bias", "2.weight"}


@every_holder
@pytest.mark.parametrize("mode", ["colocate", "server"])
def test_an_error_of_vllm_leaves_nothing_merged(holder: str, mode: str) -> None:
    case = Case(holder, mode=mode)
    before = case.weights()
    case.fails_at = "0.weight"
    # The error, which is kept here, must not keep the weight merged.
    with pytest.raises(InterruptedError) as error:
        case.hand_over()
    case.assert_nothing_is_left(before)
    assert error.value


@every_holder
@pytest.mark.parametrize("settings", [{"dtype": torch.float32}, {"adapter": False}], ids=["float32", "no adapter"])
def test_a_model_that_does_not_drift_is_left_alone(holder: str, settings: dict[str, Any]) -> None:
    case = Case(holder, **settings)
    with tiny.counted(ID) as counts:
        case.hand_over()
        assert counts().acted == 0
    assert case.given
    assert not case.shadows


class Trainer:
    def __init__(self, model: Any, state: Any) -> None:
        self.model, self.accelerator = model, SimpleNamespace(state=state, is_main_process=True)


@pytest.mark.parametrize(
    ("plugins", "is_other"),
    [
        ({"deepspeed_plugin": None}, True),
        ({"deepspeed_plugin": None, "fsdp_plugin": None}, True),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=2)}, True),
        ({"deepspeed_plugin": SimpleNamespace(zero_stage=3)}, False),
        ({"deepspeed_plugin": None, "fsdp_plugin": SimpleNamespace(fsdp_version=2)}, False),
    ],
)
def test_zero_3_and_fsdp_have_the_model_as_it_is(plugins: dict[str, Any], is_other: bool) -> None:
    model, seen = model_of(), list[set[str]]()
    trainer = Trainer(model, SimpleNamespace(**plugins))
    patch.merge_one_by_one(Call(lambda: seen.append(OWN & set(vars(model))), trainer))
    assert seen == [OWN if is_other else set()]
    assert not OWN & set(vars(model))


def test_fsdp_is_warned_of_once_for_each_object(messages: list[str]) -> None:
    state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=SimpleNamespace())
    first, second = (Trainer(model_of(), state) for _ in range(2))
    for trainer, said in ((first, 1), (first, 1), (second, 2)):
        patch.merge_one_by_one(Call(lambda: None, trainer))
        assert len(messages) == said
    assert "FSDP" in messages[0]


def with_base_weight(dtype: Any) -> Any:
    """Return a model whose first base layer has a weight of this type and no bias, or no parameter at all."""
    model = model_of()
    base = model.get_submodule("base_model.model.0").get_base_layer()
    weight = base.weight
    del base.bias, base.weight
    if dtype is not None:
        base.weight = torch.nn.Parameter(weight.to(dtype), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("dtype", "is_merged"), [(torch.uint8, False), (None, False), (torch.float32, True), (torch.float16, True)]
)
def test_a_model_with_a_quantised_layer_is_left_alone(dtype: Any, is_merged: bool) -> None:
    assert bool(patch._layers_in_half_precision(with_base_weight(dtype))) is is_merged


def test_adapters_outside_of_a_peft_model_are_not_merged() -> None:
    assert patch._layers_in_half_precision(model_of())
    assert not patch._layers_in_half_precision(model_of().base_model.model)


@pytest.mark.skipif(
    "target_parameters" not in {field.name for field in fields(LoraConfig)}, reason="this PEFT knows modules alone"
)
def test_both_adapters_of_one_module_are_merged() -> None:
    class Experts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = (torch.nn.Parameter(torch.ones(2, *shape)) for shape in ((2, 3), (3, 2)))

    settings = {"target_modules": [], "target_parameters": ["0.up", "0.down"]}
    with warnings.catch_warnings():
        # PEFT does not know the module.
        warnings.simplefilter("ignore")
        model: Any = torch.nn.Sequential(Experts()).to(torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=1, init_lora_weights=False, **settings))
    fill(model)
    expected = copy.deepcopy(model)
    expected.merge_adapter()
    given = patch._one_by_one(patch._layers_in_half_precision(model), model.named_parameters())
    assert [name for name, weight in given if not weight.equal(expected.get_parameter(name))] == []


@every_holder
def test_trl_moves_the_base_model_as_peft_does(holder: str, switch: Any) -> None:
    peft = model_of()
    peft.merge_adapter()
    peft.unmerge_adapter()
    with switch.off():
        case = Case(holder)
        before = case.weights()
        case.hand_over()
    after = case.weights()
    assert all(after[name].equal(weight) for name, weight in peft.named_parameters())
    assert not all(after[name].equal(weight) for name, weight in before.items())
