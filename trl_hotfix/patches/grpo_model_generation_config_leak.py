"""GRPO and RLOO sample with the checkpoint's temperature, top_p, top_k, min_p or repetition_penalty, not the trainer's.

transformers 4.50 and later merges ``model.generation_config`` into the ``generation_config`` that ``generate`` is
given: where the latter has the library's default, the checkpoint's value is taken (transformers issue 42762). The
trainer asks for ``temperature=1.0``, which is the default, so a checkpoint that ships ``temperature=0.6, top_p=0.95``
(Qwen3, DeepSeek-R1 distillates, ...) samples with those. The log-probs are those of temperature 1: completions come
from a sharper distribution than the one that is optimised, entropy falls, and one warning about "default values that
have been modified" is all there is. With vLLM nothing is merged.

TRL 0.26.2 (pull request 4647) puts what the trainer asks for into the model's config while it generates, and
transformers 5 does not merge. Here the model has, for the time of the call, a copy of its config with the trainer's
value wherever the merge would take the model's. Everything else in it stays, and what is saved is the checkpoint's own.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..stubs import completions_of, default_arguments, stub_that_generates, tiny_attention_model

_ASKED_FOR = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""What ``GRPOConfig`` and ``RLOOConfig`` say of the distribution; besides, what is in ``generation_kwargs``."""


def sample_as_the_trainer_says(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """While it generates, the model's own config says what the trainer's does, where it would be merged into it."""
    import copy

    from transformers import GenerationConfig

    wanted = getattr(instance, "generation_config", None)
    # The module that generates has it, beneath FSDP, PEFT or torch.compile.
    model = next((each for each in instance.model.modules() if "generation_config" in vars(each)), None)
    its = None if model is None else model.generation_config
    if wanted is None or its is None:
        return wrapped(*args, **kwargs)
    default = GenerationConfig()
    names = {*_ASKED_FOR, *(getattr(instance.args, "generation_kwargs", None) or {})}
    merged = {
        name: getattr(wanted, name, None)
        for name in names
        if getattr(wanted, name, None) == getattr(default, name, None) != getattr(its, name, None)
    }
    if not merged:
        return wrapped(*args, **kwargs)
    told = copy.deepcopy(its)
    for name, value in merged.items():
        setattr(told, name, value)
    with shadowed(model, "generation_config", told):
        return wrapped(*args, **kwargs)


def completions_are_sampled_at_the_trainers_temperature(module: ModuleType) -> Outcome:
    """The trainer asks for 1.0, the checkpoint says 0.5: with which of them does transformers sample?"""
    import transformers
    from packaging.version import Version

    if not Version("4.50") <= Version(transformers.__version__) < Version("5.0.0.dev0"):
        return absent("this transformers takes what it is given")
    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    unwrap = getattr(module, "unwrap_model_for_generation", None)
    if unwrap is None or not hasattr(getattr(module, f"{method}Trainer"), "_generate_and_score_completions"):
        return absent("this release generates elsewhere")
    if "generation_kwargs" in inspect.signature(unwrap).parameters:
        return absent("this release gives the model what it asks for itself")

    class Sampled(Exception):
        pass

    def generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        # What the model's own generate begins with; what it would go on with draws random numbers.
        raise Sampled(model._prepare_generation_config(generation_config)[0].temperature)

    model = tiny_attention_model()
    model.generation_config.temperature = 0.5
    model.generate = generate
    settings = default_arguments(getattr(module, f"{method}Config"))
    asked_for = transformers.GenerationConfig(do_sample=True, temperature=1.0, pad_token_id=0, eos_token_id=1)
    trainer = stub_that_generates(getattr(module, f"{method}Trainer"), settings, model, generation_config=asked_for)
    try:
        completions_of(trainer)
    except Sampled as sampled:
        (temperature,) = sampled.args
    left = model.generation_config.temperature
    if left != 0.5:
        raise AssertionError(f"the model's own temperature is {left} afterwards")
    return judge(temperature, right=1.0, wrong=0.5)
