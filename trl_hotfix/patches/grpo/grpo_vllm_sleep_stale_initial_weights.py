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
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import class_with_vllm, stub_that_generates


@wrapper
def hand_over_again(call: Call) -> Any:
    """Generate, and let the trainer hand its weights over, although it has done so in this step."""
    instance = call.trainer
    # With a server, or without vLLM, there is no engine in this process.
    sleeps = hasattr(instance, "llm") and instance.args.vllm_enable_sleep_mode
    if sleeps and instance._last_loaded_step == instance.state.global_step:
        instance._last_loaded_step = None
        call.act()
    return call()


@wrapper
def hand_over_instead_of_reloading(call: Call) -> Any:
    """Generate, and give vLLM the model's weights when TRL has it reload its checkpoint."""
    instance = call.trainer
    # With a server there is no engine in this process.
    if not instance.enable_sleep_mode or not hasattr(instance, "llm"):
        return call()
    call_workers = instance.llm.collective_rpc

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method != "reload_weights":
            return call_workers(method, *args, **kwargs)
        return instance.sync_weights()

    with shadowed(instance.llm, "collective_rpc", collective_rpc):
        return call()


_METHODS = {"VLLMGeneration": "generate", **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), "_generate_single_turn")}
"""The classes that wake vLLM up, and their methods."""

_SETTINGS = {"use_vllm": True, "vllm_mode": "colocate", "mode": "colocate", "generation_kwargs": {}}
_SETTINGS |= {"vllm_enable_sleep_mode": True, "enable_sleep_mode": True, "_llm_weights_sleeping": True}
_SETTINGS |= {"guided_decoding_regex": None, "structured_outputs_regex": None, "_last_loaded_step": 0}
"""Fields and attributes of one or the other class. The weights have been handed over in this step."""


def vllm_has_the_trained_weights(module: ModuleType) -> Outcome:
    """Generate a token that is the weight in vLLM: 2 is the model's, 1 the checkpoint's, and 0 what sleep has left."""
    import torch

    if isinstance(holder := class_with_vllm(module, _METHODS, "this module does not generate with vLLM"), Outcome):
        return holder
    code = inspect.unwrap(getattr(holder, _METHODS[holder.__name__])).__code__
    is_trainer = holder.__name__ != "VLLMGeneration"
    if is_trainer and "weights" not in code.co_consts:
        return absent("weights of vLLM are not woken up by themselves: it keeps them when it sleeps")
    weights, model = [0], torch.nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(2)

    def generate(prompts: Any, **settings: Any) -> list[Any]:
        completion = SimpleNamespace(token_ids=weights, logprobs=[{0: SimpleNamespace(logprob=-1.0, rank=1)}])
        return [SimpleNamespace(prompt_token_ids=[3], outputs=[completion])]

    runner = SimpleNamespace(model=SimpleNamespace(load_weights=lambda given: weights.__setitem__(0, int(given[0][1]))))
    engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner)))
    llm = SimpleNamespace(llm_engine=engine, generate=generate, chat=generate, reset_prefix_cache=lambda: None)
    llm.wake_up = llm.sleep = lambda **settings: None
    llm.collective_rpc = lambda method: weights.__setitem__(0, 1)
    config = getattr(module, holder.__name__.replace("Trainer", "Config"))
    parameters = inspect.signature(inspect.unwrap(config.__init__)).parameters
    args = SimpleNamespace(**{**{name: each.default for name, each in parameters.items()}, **_SETTINGS})
    instance = stub_that_generates(holder, args, model, llm=llm)
    if hasattr(module, "DistributedBackend"):
        instance._dist = module.DistributedBackend(instance.accelerator)
    # RLOO of 0.25 and 0.26 generates for conversations only.
    prompt = [{"role": "user", "content": "a"}] if "is_conversational" in code.co_names else [3]
    known = {"prompts": [prompt], "images": None, "num_generations": 1}
    with _vllm(module):
        getattr(instance, "sync_weights", lambda: None)()
        given = {name: known[name] for name in known if name in code.co_varnames[: code.co_argcount]}
        _, [(token,)], *_ = getattr(instance, _METHODS[holder.__name__])(**given)
    return judge(float(token), right=2.0, wrong=float(not is_trainer or "collective_rpc" in code.co_names))


@contextmanager
def _vllm(module: ModuleType) -> Iterator[None]:
    """Let the module have the names of vLLM, which some releases import when they generate."""
    vllm: Any = SimpleNamespace(__version__="0.12.0", StructuredOutputsParams=SimpleNamespace)
    missing = {"vllm", "vllm.sampling_params"} - sys.modules.keys()
    sys.modules.update(dict.fromkeys(missing, vllm))
    try:
        with shadowed(module, "SamplingParams", SimpleNamespace), shadowed(module, "vllm", vllm):
            yield
    finally:
        for name in missing:
            del sys.modules[name]
