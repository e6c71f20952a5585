"""GRPO and RLOO sample with the checkpoint's generation config where the trainer asks for the library's default.

transformers 4.50 and later 4.x releases merge ``model.generation_config`` into the ``generation_config`` that
``generate`` is given: where the latter has the library's default, the checkpoint's value is taken (transformers issue
42762). transformers 5 does not merge.

TRL 0.26.2 (pull request 4647) puts the trainer's values into the model's config while it generates. The wrapper does so
in a copy that the model has for the time of the call, so that everything else in the config stays, and a saved
checkpoint keeps its own config.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..testing import completions_of, default_arguments, stub_that_generates, tiny_attention_model

_ASKED_FOR = ("do_sample", "temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of ``GRPOConfig`` and ``RLOOConfig`` that shape the distribution; ``generation_kwargs`` may name more."""


def sample_as_the_trainer_says(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate with the trainer's values in the model's own config, where the merge would take the model's."""
    import copy

    from transformers import GenerationConfig

    trainer_config = getattr(instance, "generation_config", None)
    # The module that generates has the config, beneath FSDP, PEFT or torch.compile.
    model = next((module for module in instance.model.modules() if "generation_config" in vars(module)), None)
    model_config = None if model is None else model.generation_config
    if trainer_config is None or model_config is None:
        return wrapped(*args, **kwargs)
    default = GenerationConfig()
    names = {*_ASKED_FOR, *(getattr(instance.args, "generation_kwargs", None) or {})}
    merged = {
        name: getattr(trainer_config, name, None)
        for name in names
        if getattr(trainer_config, name, None) == getattr(default, name, None) != getattr(model_config, name, None)
    }
    if not merged:
        return wrapped(*args, **kwargs)
    changed = copy.deepcopy(model_config)
    for name, value in merged.items():
        setattr(changed, name, value)
    with shadowed(model, "generation_config", changed):
        return wrapped(*args, **kwargs)


def completions_are_sampled_at_the_trainers_temperature(module: ModuleType) -> Outcome:
    """Read the temperature with which transformers samples, if the trainer asks for 1.0 and the checkpoint has 0.5."""
    import transformers
    from packaging.version import Version

    if not Version("4.50") <= Version(transformers.__version__) < Version("5.0.0.dev0"):
        return absent("this transformers takes what it is given")
    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class = getattr(module, f"{method}Trainer")
    unwrap = getattr(module, "unwrap_model_for_generation", None)
    if unwrap is None or (method == "RLOO" and not hasattr(trainer_class, "_generate_and_score_completions")):
        return absent("this release generates elsewhere")
    if "generation_kwargs" in inspect.signature(unwrap).parameters:
        return absent("this release gives the model what it asks for itself")

    class Sampled(Exception):
        pass

    def generate(*args: Any, generation_config: Any, **kwargs: Any) -> Any:
        # The model's own generate begins with this call. The rest of it would draw random numbers.
        raise Sampled(model._prepare_generation_config(generation_config)[0].temperature)

    model = tiny_attention_model()
    model.generation_config.temperature = 0.5
    model.generate = generate
    settings = default_arguments(getattr(module, f"{method}Config"))
    asked_for = transformers.GenerationConfig(do_sample=True, temperature=1.0, pad_token_id=0, eos_token_id=1)
    trainer = stub_that_generates(trainer_class, settings, model, generation_config=asked_for)
    try:
        if "_get_train_sampler" in vars(trainer_class):
            completions_of(trainer)
        else:
            # 0.14.0 generates in the method that computes the loss.
            trainer.compute_loss(model, [{"prompt": "a"}])
    except Sampled as sampled:
        (temperature,) = sampled.args
    restored = model.generation_config.temperature
    if restored != 0.5:
        raise AssertionError(f"the model's own temperature is {restored} afterwards")
    return judge(temperature, right=1.0, wrong=0.5)
