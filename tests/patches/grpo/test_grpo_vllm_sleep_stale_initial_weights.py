"""vLLM that wakes up generates with the weights that the model has now, in every generation."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_hotfix.authoring import Call
from trl_hotfix.model import Outcome
from trl_hotfix.patches.grpo import grpo_vllm_sleep_stale_initial_weights as patch
from trl_hotfix.testing import class_with_vllm, default_arguments, stub_that_generates

import tiny

ID = "grpo-vllm-sleep-stale-initial-weights"
STEPS = (0, 0, 1, 1, 2)
"""The steps of the generations. Every second one is an evaluation's."""


def holders() -> dict[str, tuple[Any, Any]]:
    """Return the modules and classes of this release that wake vLLM up."""
    found = {}
    for name in ("trl.trainer.grpo_trainer", "trl.trainer.rloo_trainer", "trl.generation.vllm_generation"):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        holder = class_with_vllm(module, patch._METHODS, "")
        if isinstance(holder, Outcome):
            continue
        code = inspect.unwrap(getattr(holder, patch._METHODS[holder.__name__])).__code__
        if holder.__name__ == "VLLMGeneration" or "weights" in code.co_consts:
            found[holder.__name__] = (module, holder)
    return found


HOLDERS = holders()
"""By the name of the class: trainers up to 0.27, and from 0.28 on VLLMGeneration."""


class Engine:
    """The part of vLLM's ``LLM`` that TRL calls. Its completions are its weights, as whole numbers."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.checkpoint, self.weights = weights, dict(weights)
        self.awake = {"weights", "kv_cache"}
        self.handed_over = 0
        self.calls: list[tuple[Any, ...]] = []
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=SimpleNamespace(model=self)))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def sleep(self, level: int = 1) -> None:
        assert level == 2
        self.awake.clear()
        # The memory that it wakes up with is another one.
        self.weights = {name: weight * 0 for name, weight in self.checkpoint.items()}

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.awake |= set(tags or ("weights", "kv_cache"))

    def collective_rpc(self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((method, timeout, args, kwargs))
        if method == "reload_weights":
            self.load_weights(self.checkpoint.items())
        return [method]

    def load_weights(self, weights: Iterable[tuple[str, Any]]) -> None:
        # 0.28.0 hands weights over while they are asleep, and they are lost.
        if "weights" in self.awake:
            self.weights |= {name: weight.detach().clone() for name, weight in weights}

    def reset_prefix_cache(self) -> None:
        self.handed_over += 1

    def chat(self, messages: list[Any], sampling_params: Any, use_tqdm: bool, **template: Any) -> list[Any]:
        return self.generate(messages, sampling_params, use_tqdm)

    def generate(self, prompts: list[Any], sampling_params: Any, use_tqdm: bool) -> list[Any]:
        assert self.awake == {"weights", "kv_cache"}
        tokens = [int(number) for name in self.checkpoint for number in self.weights[name].flatten()]
        chances = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in tokens]
        completion = SimpleNamespace(token_ids=tokens, logprobs=chances)
        return [SimpleNamespace(prompt_token_ids=[3, 4], outputs=[completion]) for _ in prompts]


class Case:
    """An object that generates with vLLM, its model of two parameters, and its engine."""

    def __init__(self, holder: str, *, sleeps: bool = True) -> None:
        module, holder_class = HOLDERS[holder]
        self.is_trainer = holder != "VLLMGeneration"
        self.model = torch.nn.Linear(2, 1)
        self.train(1)
        self.engine = Engine({name: weight.detach().clone() for name, weight in self.model.named_parameters()})
        if sleeps:
            self.engine.sleep(level=2)
        settings = {**patch._SETTINGS, "_last_loaded_step": -1, "_weight_metadata": None}
        settings |= dict.fromkeys(("vllm_enable_sleep_mode", "enable_sleep_mode", "_llm_weights_sleeping"), sleeps)
        if self.is_trainer:
            args = default_arguments(vars(module)[holder.replace("Trainer", "Config")], **settings)
        else:
            parameters = inspect.signature(inspect.unwrap(holder_class.__init__)).parameters
            args = SimpleNamespace(**{**{name: each.default for name, each in parameters.items()}, **settings})
        self.instance = stub_that_generates(holder_class, args, self.model, llm=self.engine)
        if hasattr(module, "DistributedBackend"):
            self.instance._dist = module.DistributedBackend(self.instance.accelerator)
        self.method = getattr(self.instance, patch._METHODS[holder])

    def train(self, value: int) -> None:
        with torch.no_grad():
            self.model.weight.copy_(torch.tensor([[value, 7 * value + 1]]))
            self.model.bias.copy_(torch.tensor([5 * value + 2]))

    def tokens(self) -> list[int]:
        """Return the weights of the model, as a completion has them."""
        return [int(number) for weight in self.model.parameters() for number in weight.flatten()]

    def begin(self, step: int) -> None:
        """Train the model, and begin a step: the trainer of a ``VLLMGeneration`` hands weights over in each."""
        self.train(step + 2)
        if self.is_trainer:
            self.instance.state.global_step = step
        else:
            self.instance.sync_weights()

    def completions(self) -> Any:
        # RLOO of 0.25 and 0.26 generates for conversations only.
        is_text = "is_conversational" in inspect.unwrap(self.method).__code__.co_names
        prompts = [[{"role": "user", "content": text}] for text in "ab"] if is_text else [[3, 4], [4, 3]]
        known = {"prompts": prompts, "images": None, "num_generations": 2}
        parameters = inspect.signature(self.method).parameters
        _, completions, *_ = self.method(**{name: known[name] for name in parameters if name in known})
        return completions


@pytest.fixture(autouse=True)
def with_vllm() -> Iterator[None]:
    """Have the names of vLLM in all modules that generate."""
    with ExitStack() as stack:
        for module, _ in HOLDERS.values():
            stack.enter_context(patch._vllm(module))
        yield


every_holder = pytest.mark.parametrize("holder", HOLDERS)
every_trainer = pytest.mark.parametrize("holder", [name for name in HOLDERS if name != "VLLMGeneration"])
generation_only = pytest.mark.skipif("VLLMGeneration" not in HOLDERS, reason="up to 0.27 trainers generate themselves")


@every_holder
def test_every_generation_of_every_step_has_the_trained_weights(holder: str) -> None:
    case, last_step = Case(holder), -1
    for number, step in enumerate(STEPS):
        if step != last_step:
            case.begin(step)
        last_step = step
        case.model.train(number % 2 == 0)
        assert case.completions() == [case.tokens()] * 2
    assert "collective_rpc" not in vars(case.engine)


@every_holder
def test_each_of_two_objects_has_its_own_weights(holder: str) -> None:
    cases = [Case(holder), Case(holder)]
    for step in range(2):
        for number, case in enumerate(cases):
            case.begin(step + 10 * number)
    for case in cases + cases:
        assert case.completions() == [case.tokens()] * 2


@every_holder
def test_the_weights_are_handed_over_once_in_a_generation(holder: str) -> None:
    case, last_step = Case(holder), -1
    with tiny.counted(ID) as counts:
        for step in STEPS:
            if step != last_step:
                case.begin(step)
            last_step = step
            case.completions()
        count = counts()
    # In the first generation of a step TRL hands them over: the trainer itself, and VLLMGeneration once more.
    new_steps = len(set(STEPS))
    assert case.engine.handed_over == len(STEPS) + (0 if case.is_trainer else new_steps)
    assert (count.called, count.acted) == (len(STEPS), len(STEPS) - (new_steps if case.is_trainer else 0))
    assert case.is_trainer or not case.engine.calls


@every_holder
def test_vllm_that_does_not_sleep_is_given_the_weights_once_a_step(holder: str) -> None:
    case, last_step = Case(holder, sleeps=False), -1
    with tiny.counted(ID) as counts:
        for step in STEPS:
            if step != last_step:
                case.begin(step)
            last_step = step
            assert case.completions() == [case.tokens()] * 2
        assert counts().acted == 0
    assert case.engine.handed_over == len(set(STEPS))


def called(case: Case, method: Callable[..., Any], *args: Any) -> Any:
    """Return what the wrapper of this object makes of a method in the place of TRL's."""
    wrapper = patch.hand_over_again if case.is_trainer else patch.hand_over_instead_of_reloading
    return wrapper(Call(method, case.instance, args))


@generation_only
def test_other_methods_of_the_workers_are_called() -> None:
    case = Case("VLLMGeneration")
    result = called(case, lambda: case.engine.collective_rpc("other", 1.0, args=(2,), kwargs={"three": 3}))
    assert result == ["other"]
    assert case.engine.calls == [("other", 1.0, (2,), {"three": 3})]
    assert case.engine.handed_over == 0


@generation_only
def test_reloading_is_as_before_after_an_error() -> None:
    case = Case("VLLMGeneration")

    def fail() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        called(case, fail)
    assert "collective_rpc" not in vars(case.engine)
    case.engine.collective_rpc("reload_weights")
    assert case.engine.handed_over == 0


@every_holder
def test_an_object_without_an_engine_is_left_alone(holder: str) -> None:
    case = Case(holder)
    del case.instance.llm
    case.instance._last_loaded_step = 0
    before = vars(case.instance).copy()
    assert called(case, lambda value: value + 2, 1) == 3
    assert vars(case.instance) == before


@every_trainer
def test_the_first_generation_of_a_step_is_left_to_the_trainer(holder: str) -> None:
    case = Case(holder)
    for last_step, seen in ((0, None), (-1, -1), (1, 1)):
        case.instance._last_loaded_step = last_step
        assert called(case, lambda: case.instance._last_loaded_step) == seen


@every_holder
def test_trl_generates_with_other_weights(holder: str, switch: Any) -> None:
    with switch.off():
        case = Case(holder)
        case.begin(0)
        first, second = case.completions(), case.completions()
    reloads = not case.is_trainer or "collective_rpc" in inspect.unwrap(case.method).__code__.co_names
    stale = [1, 8, 7] if reloads else [0, 0, 0]
    assert first == [case.tokens() if case.is_trainer else stale] * 2
    assert second == [stale] * 2
