"""vLLM that wakes up has lost its weights, and is not given the model's.

``sleep(level=2)`` drops the weights, so after ``wake_up`` they must come from somewhere. GRPO and RLOO of 0.25 hand the
trained weights over if the step is a new one, and otherwise leave vLLM without any. From 0.26.0 on TRL calls
``collective_rpc("reload_weights")`` before every generation, which takes those of the checkpoint that vLLM began with.
GRPO and RLOO up to 0.27.2 hand the trained weights over after it, if the step is a new one. From 0.28.0 on
``VLLMGeneration.generate`` reloads, and what ``sync_weights`` has handed over before is lost. 1.10.0 does not reload:
``generate`` hands the weights over if they have been asleep.

So every step is a new one up to 0.27.2. From 0.28.0 on the weights are handed over at the point where TRL reloads, when
they are awake in every release.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import absent, act, judge, shadowed
from ...model import Outcome, Verdict
from ...testing import class_with_vllm, default_arguments, stub_that_generates


def hand_over_again(wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Generate, and let the trainer hand its weights over, although it has done so in this step."""
    # With a server, or without vLLM, there is no engine in this process.
    sleeps = hasattr(instance, "llm") and instance.args.vllm_enable_sleep_mode
    if sleeps and instance._last_loaded_step == instance.state.global_step:
        instance._last_loaded_step = None
        act()
    return wrapped(*args, **kwargs)


def hand_over_instead_of_reloading(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate, and let vLLM be given the model's weights when it is told to reload its checkpoint."""
    # With a server there is no engine in this process.
    if not instance.enable_sleep_mode or not hasattr(instance, "llm"):
        return wrapped(*args, **kwargs)
    call_workers = instance.llm.collective_rpc

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method != "reload_weights":
            return call_workers(method, *args, **kwargs)
        return instance.sync_weights()

    with shadowed(instance.llm, "collective_rpc", collective_rpc):
        return wrapped(*args, **kwargs)


@contextmanager
def _vllm(module: ModuleType) -> Iterator[None]:
    """Let the module have the names of vLLM, which some releases import when they generate."""
    modules = {name: ModuleType(name) for name in ("vllm", "vllm.sampling_params")}
    modules["vllm"].__version__ = "0.12.0"  # type: ignore[attr-defined]
    names = {"SamplingParams": SimpleNamespace, "StructuredOutputsParams": SimpleNamespace}
    vars(modules["vllm.sampling_params"]).update(names)
    before = {name: sys.modules.get(name) for name in modules}
    with ExitStack() as stack:
        for name, value in {**names, "vllm": modules["vllm"]}.items():
            stack.enter_context(shadowed(module, name, value))
        sys.modules.update(modules)
        try:
            yield
        finally:
            for name, known in before.items():
                sys.modules.pop(name)
                if known is not None:
                    sys.modules[name] = known


class _Engine:
    """The part of vLLM's ``LLM`` that TRL calls. Its completions are its weights, as whole numbers."""

    def __init__(self, weights: dict[str, Any]) -> None:
        self.checkpoint, self.weights = weights, dict[str, Any]()
        self.awake: set[str] = set()
        self.handed_over = 0
        self.calls: list[tuple[Any, ...]] = []
        self.is_shadowed = False
        runner = SimpleNamespace(model=self)
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        self.llm_engine = SimpleNamespace(model_executor=executor)

    def sleep(self, level: int = 1) -> None:
        if level != 2:
            raise AssertionError(f"vLLM is to sleep at level {level}")
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
        self.is_shadowed |= "collective_rpc" in vars(self)
        if self.awake != {"weights", "kv_cache"}:
            raise AssertionError(f"vLLM generates with {self.awake} awake")
        tokens = [int(number) for name in self.checkpoint for number in self.weights[name].flatten()]
        chances = [{token: SimpleNamespace(logprob=-1.0, rank=1)} for token in tokens]
        completion = SimpleNamespace(token_ids=tokens, logprobs=chances)
        return [SimpleNamespace(prompt_token_ids=[3, 4], outputs=[completion]) for _ in prompts]


_METHODS = {
    "GRPOTrainer": "_generate_single_turn",
    "RLOOTrainer": "_generate_single_turn",
    "VLLMGeneration": "generate",
}
"""The classes that wake vLLM up, and their methods."""

_STEPS = (0, 0, 1, 1, 2)
"""The steps of the generations. The last one of a step is an evaluation's, but for the newest step."""


def vllm_has_the_trained_weights(module: ModuleType) -> Outcome:
    """Generate five times in three steps, with a model that has moved on since its checkpoint, and moves in each step.

    Right are completions from the model's weights. Wrong are those of the checkpoint where TRL reloads it last, and
    those of no weights where it leaves vLLM without.
    """
    holder = class_with_vllm(module, _METHODS, "this module does not generate with vLLM")
    if isinstance(holder, Outcome):
        return holder
    code = inspect.unwrap(getattr(holder, _METHODS[holder.__name__])).__code__
    is_trainer = holder.__name__ != "VLLMGeneration"
    if is_trainer and "weights" not in code.co_consts:
        return absent("weights of vLLM are not woken up by themselves: it keeps them when it sleeps")
    with _vllm(module):
        case = _Case(module, holder)
        tokens = case.completions()
        right = [number for step in _STEPS for number in _weights(step + 2)]
        stale = _weights(1) if "collective_rpc" in code.co_names or not is_trainer else [0, 0, 0]
        is_right = [is_trainer and step not in _STEPS[:number] for number, step in enumerate(_STEPS)]
        wrong = [
            number
            for step, hands_over in zip(_STEPS, is_right, strict=True)
            for number in (_weights(step + 2) if hands_over else stale)
        ]
        outcome = judge(_weighted(tokens), right=_weighted(right), wrong=_weighted(wrong))
        is_fixed = outcome.verdict is Verdict.FIXED
        if tokens != (right if is_fixed else wrong):
            raise AssertionError(f"the completions are {tokens}: expected {right}")
        if is_fixed:
            _handed_over_once_in_a_generation(case, is_trainer=is_trainer)
            _left_alone(_Case(module, holder, sleeps=False), right)
            if not is_trainer:
                _only_reloading_is_replaced(_Case(module, holder))
            _without_an_engine(_Case(module, holder))
    return outcome


class _Case:
    """An object that generates with vLLM in three steps, its model of two parameters, and its engine."""

    def __init__(self, module: ModuleType, holder: Any, *, sleeps: bool = True) -> None:
        import torch

        self.model = torch.nn.Linear(2, 1)
        self.move(1)
        self.engine = _Engine({name: weight.detach().clone() for name, weight in self.model.named_parameters()})
        self.engine.wake_up()
        self.engine.load_weights(self.engine.checkpoint.items())
        if sleeps:
            self.engine.sleep(level=2)
        make = _generation if holder.__name__ == "VLLMGeneration" else _trainer
        self.instance = make(module, holder, self.model, self.engine, sleeps=sleeps)
        self.method = getattr(self.instance, _METHODS[holder.__name__])

    def move(self, value: int) -> None:
        import torch

        numbers = _weights(value)
        with torch.no_grad():
            for weight in self.model.parameters():
                own, numbers = numbers[: weight.numel()], numbers[weight.numel() :]
                weight.copy_(torch.tensor(own).reshape(weight.shape))

    def completions(self) -> list[int]:
        """Return the tokens of all completions, of which each generation has two."""
        tokens, last_step = [], -1
        for number, step in enumerate(_STEPS):
            self.move(step + 2)
            self.model.train(number % 2 == 0)
            if hasattr(self.instance, "state"):
                self.instance.state.global_step = step
            elif step != last_step:
                # The trainer does so.
                self.instance.sync_weights()
            last_step = step
            _, completions, *_ = self.method(**self._arguments())
            first, second = completions
            if first != second:
                raise AssertionError(f"a generation has the completions {completions}")
            tokens += first
        return tokens

    def _arguments(self) -> dict[str, Any]:
        is_text = "is_conversational" in inspect.unwrap(self.method).__code__.co_names
        # RLOO of 0.25 and 0.26 generates for conversations only.
        prompts = [[{"role": "user", "content": text}] for text in "ab"] if is_text else [[3, 4], [4, 3]]
        known = {"prompts": prompts, "images": None, "num_generations": 2}
        return {name: known[name] for name in inspect.signature(self.method).parameters if name in known}


def _trainer(module: ModuleType, holder: Any, model: Any, engine: _Engine, *, sleeps: bool) -> Any:
    """Return a GRPO or RLOO trainer that has its engine itself."""
    config_class = vars(module)[holder.__name__.replace("Trainer", "Config")]
    settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_enable_sleep_mode": sleeps}
    regex = {"guided_decoding_regex": None, "structured_outputs_regex": None}
    args = default_arguments(config_class, **settings)
    return stub_that_generates(holder, args, model, llm=engine, _last_loaded_step=-1, **regex)


def _generation(module: ModuleType, holder: Any, model: Any, engine: _Engine, *, sleeps: bool) -> Any:
    """Return a ``VLLMGeneration``."""
    parameters = inspect.signature(inspect.unwrap(holder.__init__)).parameters.values()
    known = {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}
    instance = object.__new__(holder)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(deepspeed_plugin=None, fsdp_plugin=None), is_main_process=True, process_index=0
    )
    own = {"mode": "colocate", "enable_sleep_mode": sleeps, "is_fsdp_enabled": False, "generation_kwargs": {}}
    own |= {"_llm_weights_sleeping": sleeps, "_weight_metadata": None, "processing_class": None}
    vars(instance).update({**known, **own, "model": model, "accelerator": accelerator, "llm": engine})
    if hasattr(module, "DistributedBackend"):
        instance._dist = module.DistributedBackend(accelerator)
    return instance


def _weights(value: int) -> list[int]:
    """Return three whole numbers for the weights of a model."""
    return [value, 7 * value + 1, 5 * value + 2]


def _weighted(tokens: list[int]) -> float:
    return float(sum(place * token for place, token in enumerate(tokens, 1)))


def _handed_over_once_in_a_generation(case: _Case, *, is_trainer: bool) -> None:
    """Check how often vLLM is given the weights: ``VLLMGeneration`` is told to hand them over in each step, too."""
    engine = case.engine
    expected = {len(_STEPS)} if is_trainer else {len(_STEPS), len(_STEPS) + len(set(_STEPS))}
    if engine.handed_over not in expected or "collective_rpc" in vars(engine):
        raise AssertionError(f"the weights are handed over {engine.handed_over} times, or a method is left")
    if not is_trainer and engine.calls:
        raise AssertionError(f"the workers were called with {engine.calls}")


def _left_alone(case: _Case, right: list[int]) -> None:
    """Check that vLLM which does not sleep is given the weights once in a step, as ever."""
    tokens = case.completions()
    if tokens != right or case.engine.is_shadowed or case.engine.handed_over != len(set(_STEPS)):
        raise AssertionError(f"vLLM that does not sleep is given weights {case.engine.handed_over} times: {tokens}")


def _only_reloading_is_replaced(case: _Case) -> None:
    """Check the calls of other methods of the workers, and an object that has no engine."""
    engine, instance = case.engine, case.instance
    result = hand_over_instead_of_reloading(
        lambda *args, **kwargs: engine.collective_rpc(*args, **kwargs), instance, ("other",), {"timeout": 1.0}
    )
    handed_over = engine.handed_over
    hand_over_instead_of_reloading(lambda: engine.collective_rpc("reload_weights"), instance, (), {})
    calls = [call for call in engine.calls if call[0] != "reload_weights"]
    if result != ["other"] or calls != [("other", 1.0, (), None)] or engine.handed_over != handed_over + 1:
        raise AssertionError(f"the workers were called with {engine.calls}")


def _without_an_engine(case: _Case) -> None:
    """Check an object that generates with a server."""
    instance = case.instance
    wrapper = hand_over_again if hasattr(instance, "state") else hand_over_instead_of_reloading
    del instance.llm
    instance._last_loaded_step = getattr(instance, "state", SimpleNamespace(global_step=0)).global_step
    before = dict(vars(instance))
    if wrapper(lambda value, *, more: value + more, instance, (1,), {"more": 2}) != 3 or vars(instance) != before:
        raise AssertionError("generating with a server returns something else")
