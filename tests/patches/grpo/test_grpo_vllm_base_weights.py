"""vLLM is given the weights with their adapters, in copies of those that a merge changes and of no others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from trl.trainer import grpo_trainer

from trl_hotfix.testing import stub_grpo_trainer

import tiny

ID, TARGET = "grpo-vllm-base-weights", "trl.trainer.grpo_trainer:GRPOTrainer._move_model_to_vllm"

each_start = pytest.mark.parametrize("start", [0.0, 1.0])


class Case:
    """A trainer with a model of two layers, the first of which has an adapter. ``given`` is what vLLM has."""

    def __init__(self, start: float = 0.0, *, adapter: bool = True, compiled: bool = False, **lora: Any) -> None:
        self.model: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, bias=False))
        self.layers = list(self.model)
        self.layers[0].register_buffer("levels", torch.arange(4))
        self.given: dict[str, Any] = {}
        """The weights themselves: what they are after the adapter is taken out again is what vLLM has."""
        self.was_shadowed = False
        if adapter:
            self.model = get_peft_model(
                self.model, LoraConfig(**{"r": 1, "lora_alpha": 1, "target_modules": ["0"], **lora})
            )
            merge = self.model.merge_adapter

            def merge_adapter(*args: Any, **kwargs: Any) -> None:
                self.was_shadowed = "state_dict" in vars(self.model)
                merge(*args, **kwargs)

            self.model.merge_adapter = merge_adapter
        for number, weight in enumerate(self.model.parameters()):
            weight.data = torch.cos(start + number + torch.arange(1.0, weight.numel() + 1)).reshape(weight.shape)
        runner = SimpleNamespace(model=SimpleNamespace(load_weights=self._load))
        worker = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=worker))
        self.trainer = stub_grpo_trainer(grpo_trainer, use_vllm=True, llm=llm)
        self.trainer.model, self.trainer.is_fsdp_enabled = self.model, False
        if compiled:
            self.trainer.model = torch.nn.Module()
            self.trainer.model._orig_mod = self.model
        self.trainer.accelerator.state = SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None)

    def _load(self, weights: Any) -> None:
        self.given = dict(weights)

    def hand_over(self) -> dict[str, Any]:
        self.given = {}
        self.trainer._move_model_to_vllm()
        return self.given

    @property
    def delta(self) -> Any:
        """What the adapter adds to the weight of the first layer."""
        layer = self.model.base_model.model[0]
        return (layer.lora_B["default"].weight @ layer.lora_A["default"].weight).detach()

    def assert_merged(self) -> None:
        before = self.base.detach().clone()
        given = self.hand_over()["0.weight"]
        torch.testing.assert_close(given, before + self.delta)
        assert not torch.allclose(given, before, atol=1e-3)
        torch.testing.assert_close(self.base, before)

    @property
    def base(self) -> Any:
        return self.layers[0].weight

    @property
    def acts(self) -> int | None:
        return tiny.acts(ID, TARGET, self.trainer)


@pytest.fixture
def known_as_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have TRL know the stand-in of a compiled model. A real one takes seconds to make."""
    monkeypatch.setattr(grpo_trainer, "is_compiled_module", lambda model: "_orig_mod" in model._modules)


@each_start
@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_the_weights_are_merged_at_each_step_and_in_an_evaluation(
    start: float, compiled: bool, known_as_compiled: None
) -> None:
    case = Case(start, compiled=compiled)
    for step, training in enumerate((True, True, False)):
        case.trainer.state.global_step = step
        case.trainer.model.train(training)
        case.assert_merged()
        case.model.base_model.model[0].lora_B["default"].weight.data += 1
    assert case.acts == 3


@each_start
def test_trl_hands_over_the_weights_of_the_base_model(start: float, switch: Any) -> None:
    case = Case(start)
    with switch.off():
        assert case.hand_over()["0.weight"].data_ptr() == case.base.data_ptr()
    assert case.delta.abs().max() > 1e-2


def test_each_trainer_hands_over_its_own_weights() -> None:
    first, second = Case(0.0), Case(1.0)
    for _ in range(2):
        first.assert_merged()
        second.assert_merged()
    assert not first.given["0.weight"].equal(second.given["0.weight"])


def test_the_names_are_those_of_the_base_model() -> None:
    given = Case().hand_over()
    assert set(given) == {"0.weight", "0.bias", "0.levels", "1.weight"}


def test_what_is_handed_over_stays_merged_while_training_goes_on() -> None:
    case = Case()
    given = case.hand_over()["0.weight"]
    before = given.clone()
    case.base.data += 1
    case.model.base_model.model[0].lora_B["default"].weight.data += 1
    assert given.equal(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_copy_keeps_its_dtype_and_lies_in_the_memory_of_the_host(dtype: Any) -> None:
    case = Case()
    case.model.to(dtype)
    given = case.hand_over()["0.weight"]
    assert given.dtype == dtype
    assert given.device.type == "cpu"


def test_every_layer_with_an_adapter_is_merged() -> None:
    case = Case(target_modules=["0", "1"])
    given = case.hand_over()
    for name, layer in zip("01", case.model.base_model.model, strict=True):
        own = layer.base_layer.weight
        added = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        torch.testing.assert_close(given[f"{name}.weight"], (own + added).detach())


def test_a_layer_without_an_adapter_is_not_copied() -> None:
    case = Case()
    assert case.hand_over()["1.weight"].data_ptr() == case.layers[1].weight.data_ptr()


def test_a_layer_that_is_trained_itself_is_not_copied() -> None:
    case = Case(modules_to_save=["1"])
    trained = case.model.base_model.model[1].modules_to_save["default"].weight
    assert case.hand_over()["1.weight"].data_ptr() == trained.data_ptr()


def test_whole_numbers_are_not_copied() -> None:
    case = Case()
    assert case.hand_over()["0.levels"].data_ptr() == case.layers[0].levels.data_ptr()


def test_the_model_has_its_own_state_dict_afterwards() -> None:
    case = Case()
    case.hand_over()
    assert case.was_shadowed
    assert "state_dict" not in vars(case.model)
    weights = case.model.state_dict()
    assert weights["base_model.model.0.base_layer.weight"].data_ptr() == case.base.data_ptr()


def test_the_model_has_its_own_state_dict_after_an_error(switch: Any) -> None:
    case = Case()

    def fail(weights: Any) -> None:
        raise ArithmeticError

    case.trainer.llm.llm_engine.model_executor.driver_worker.model_runner.model.load_weights = fail
    with switch.on(), pytest.raises(ArithmeticError):
        case.hand_over()
    assert "state_dict" not in vars(case.model)


@each_start
def test_a_rank_that_hands_over_nothing_copies_nothing(start: float) -> None:
    case = Case(start)
    case.trainer.accelerator.is_main_process = False
    assert case.hand_over() == {}
    assert not case.was_shadowed
    assert case.acts == 0


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
def test_a_model_without_an_adapter_hands_over_its_own_weights(compiled: bool, known_as_compiled: None) -> None:
    case = Case(adapter=False, compiled=compiled)
    given = case.hand_over()
    assert not isinstance(case.model, PeftModel)
    assert given.keys() == case.model.state_dict().keys()
    assert all(given[name].data_ptr() == weight.data_ptr() for name, weight in case.model.state_dict().items())
    assert case.acts == 0
