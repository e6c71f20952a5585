"""Trainers with continuous batching cast the float32 weights that are trained to bfloat16 for good.

The wrapper replaces the parameters of the model while it generates: the new ones share the memory of the originals.
``model.to`` then makes a copy in bfloat16 for the generation, as before, and does not change the originals. They are
restored afterwards as the same objects, with their gradients, their place in the optimizer and the hooks of DDP.

Buffers are restored, too. A model that is loaded in bfloat16 has no other weights, but the frequencies of its rotary
positions are in float32, and the cast takes up to 0.4 % from them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, Once, absent, judge, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    StopConstruction,
    absent_if_reexported,
    completions_of,
    default_arguments,
    stub_that_generates,
    tiny_causal_lm,
    trainer_and_config,
)

_OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")
_log = logging.getLogger("trl_hotfix")
_first_warning = Once()


@wrapper
def keep_the_weights_as_they_are(call: Call) -> Any:
    """Generate with copies of the weights if the trainer would cast them."""
    import torch

    trainer, model = call.trainer, call.trainer.model
    dtype = torch.bfloat16 if trainer.args.bf16 else torch.float16 if trainer.args.fp16 else None
    batching = any(getattr(trainer, name, False) for name in _OPTIONS) and not trainer.use_vllm
    if not batching or dtype is None:
        return call()
    cast = [weight for weight in model.parameters() if weight.is_floating_point() and weight.dtype != dtype]
    if cast and (trainer.is_fsdp_enabled or any(hasattr(weight, "ds_id") for weight in cast)):
        if _first_warning(trainer):
            _log.warning(
                "grpo-continuous-batching-casts-master-weights: the weights are sharded, and generating with "
                "continuous batching casts them to %s for good. Use vLLM, or leave use_transformers_paged and "
                "use_transformers_continuous_batching off.",
                dtype,
            )
        return call()
    with _replaced_parameters(model, cast) as restore:
        generate_batch = model.generate_batch

        def generate_and_restore(*args: Any, **kwargs: Any) -> Any:
            outputs = generate_batch(*args, **kwargs)
            # Up to 0.23 the same method scores the completions afterwards, which needs the original weights.
            restore()
            return outputs

        with shadowed(model, "generate_batch", generate_and_restore):
            return call()


@contextmanager
def _replaced_parameters(model: Any, cast: list[Any]) -> Iterator[Callable[[], None]]:
    """Give ``model`` others for these parameters on the same memory, until the function that is yielded restores all.

    The buffers are restored, too.
    """
    import torch

    # Tied weights stay tied. A subclass (quantised, DTensor) cannot be rebuilt from its data alone.
    substitutes = {id(weight): torch.nn.Parameter(weight.data) for weight in cast if type(weight) is torch.nn.Parameter}
    originals = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]

    def restore() -> None:
        for module, parameters, buffers in originals:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    for module, parameters, _ in originals:
        module._parameters.update({name: substitutes.get(id(own), own) for name, own in parameters.items()})
    try:
        yield restore
    finally:
        restore()


def weights_are_float32_after_a_generation(module: ModuleType) -> Outcome:
    """Count the bits of a weight after a generation with continuous batching, in a run with ``bf16=True``."""
    trainer_class, config_class = trainer_and_config(module, "GRPO", "RLOO", "OnlineDPO")
    if trainer_class.__name__ == "OnlineDPOTrainer" and (
        reexported := absent_if_reexported(module, trainer_class.training_step)
    ):
        return reexported
    if not any(name in config_class.__dataclass_fields__ for name in _OPTIONS):
        return absent("this release has no continuous batching")

    def generate_batch(*args: Any, **kwargs: Any) -> Any:
        raise StopConstruction

    # Up to 0.23 the trainer sets another attention for the generation.
    model = tiny_causal_lm(SimpleNamespace(_attn_implementation="sdpa"))
    model.generate_batch = generate_batch
    settings = default_arguments(config_class, bf16=True, fp16=False)
    unset: dict[str, Any] = {"generation_config": None, "continuous_batching_config": None, "generation_kwargs": {}}
    unset |= {"image_token": None, "is_vision_model": False, "_is_vlm": False, "use_vllm": False}
    trainer = stub_that_generates(trainer_class, settings, model, **unset, **dict.fromkeys(_OPTIONS, True))
    with suppress(StopConstruction):
        completions_of(trainer)
    return judge(8.0 * model.weight.element_size(), right=32.0, wrong=16.0)
