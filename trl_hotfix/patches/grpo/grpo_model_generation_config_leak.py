"""GRPO and RLOO sample with the checkpoint's generation config where the trainer asks for the library's default.

transformers 4.50 and later 4.x releases merge ``model.generation_config`` into the ``generation_config`` that
``generate`` is given: where the latter has the library's default, the checkpoint's value is taken (transformers issue
42762). transformers 5 does not merge.

TRL 0.26.2 (pull request 4647) puts the trainer's values into the model's config while it generates. The wrapper does so
in a copy that the model has for the time of the call, so that everything else in the config stays, and a saved
checkpoint keeps its own config.
"""

from __future__ import annotations

import copy
import inspect
from types import ModuleType
from typing import Any

from ...authoring import Call, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import completions_of, default_arguments, stub_that_generates

_ASKED_FOR = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The fields of ``GRPOConfig`` and ``RLOOConfig`` that shape the distribution; ``generation_kwargs`` may name more."""


@wrapper
def sample_as_the_trainer_says(call: Call) -> Any:
    """Generate with the trainer's values in the model's own config, where the merge would take the model's."""
    from transformers import GenerationConfig

    trainer = call.trainer
    trainer_config = getattr(trainer, "generation_config", None)
    # The module that generates has the config, beneath FSDP, PEFT or torch.compile.
    configured = (module for module in trainer.model.modules() if vars(module).get("generation_config") is not None)
    model = next(configured, None)
    if trainer_config is None or model is None:  # vLLM generates, or a model that has no config of its own.
        return call()
    asked_for, own, default = map(vars, (trainer_config, model.generation_config, GenerationConfig()))
    names = {*_ASKED_FOR, *(getattr(trainer.args, "generation_kwargs", None) or {})}
    merged = {name: asked_for[name] for name in names if asked_for[name] == default.get(name) != own.get(name)}
    if not merged:
        return call()
    changed = copy.deepcopy(model.generation_config)
    vars(changed).update(merged)
    with shadowed(model, "generation_config", changed):
        return call()


def completions_are_sampled_as_the_trainer_asks(module: ModuleType) -> Outcome:
    """Read the temperature with which transformers samples: the trainer asks for 1, and the checkpoint has 0.5."""
    import torch
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

    class Model(torch.nn.Module, transformers.GenerationMixin):  # type: ignore[misc]
        is_gradient_checkpointing = False

        def generate(self, *args: Any, generation_config: Any, **kwargs: Any) -> None:
            # That of transformers begins with this call.
            raise _Sampled(self._prepare_generation_config(generation_config)[0].temperature)

    model = Model()
    model.generation_config = transformers.GenerationConfig(do_sample=True, temperature=0.5)
    asked_for = transformers.GenerationConfig(do_sample=True, eos_token_id=1)
    settings = default_arguments(getattr(module, f"{method}Config"))
    trainer = stub_that_generates(trainer_class, settings, model, generation_config=asked_for)
    try:
        # 0.14.0 generates in the method that computes the loss.
        if "_get_train_sampler" in vars(trainer_class):
            completions_of(trainer)
        else:
            trainer.compute_loss(model, [{"prompt": "a"}])
    except _Sampled as sampled:
        return judge(sampled.args[0], right=1.0, wrong=0.5)
    raise AssertionError("the model does not generate")


class _Sampled(Exception):
    """The temperature with which transformers samples."""
