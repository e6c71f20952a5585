"""GRPO and RLOO with continuous batching cast the float32 weights that are trained to bfloat16 for good.

The wrapper replaces the parameters of the model while it generates: the new ones share the memory of the originals.
``model.to`` then makes a copy in bfloat16 for the generation, as before, and does not change the originals. They are
restored afterwards as the same objects, with their gradients, their place in the optimizer and the hooks of DDP.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..testing import completions_of, default_arguments, stub_that_generates, tiny_attention_model

_OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")


def keep_the_weights_as_they_are(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate with copies of the weights if the trainer would cast them."""
    import torch

    dtype = torch.bfloat16 if instance.args.bf16 else torch.float16 if instance.args.fp16 else None
    batching = any(getattr(instance, name, False) for name in _OPTIONS) and not getattr(instance, "use_vllm", False)
    if not batching or dtype is None:
        return wrapped(*args, **kwargs)
    model = instance.model
    cast = [weight for weight in model.parameters() if weight.is_floating_point() and weight.dtype != dtype]
    if not cast:
        return wrapped(*args, **kwargs)
    if instance.is_fsdp_enabled or any(hasattr(weight, "ds_id") for weight in cast):
        if not getattr(instance, "_trl_hotfix_warned_of_cast", False):
            instance._trl_hotfix_warned_of_cast = True
            logging.getLogger("trl_hotfix").warning(
                "grpo-continuous-batching-casts-master-weights: the weights are sharded, and generating with "
                "continuous batching casts them to %s for good. Use vLLM, or leave use_transformers_paged and "
                "use_transformers_continuous_batching off.",
                dtype,
            )
        return wrapped(*args, **kwargs)
    with _replaced_parameters(model) as restore:
        generate_batch = model.generate_batch

        def generate_and_restore(*args: Any, **kwargs: Any) -> Any:
            # Up to 0.23 the same method scores the completions afterwards, which needs the original weights.
            try:
                return generate_batch(*args, **kwargs)
            finally:
                restore()

        with shadowed(model, "generate_batch", generate_and_restore):
            return wrapped(*args, **kwargs)


@contextmanager
def _replaced_parameters(model: Any) -> Iterator[Callable[[], None]]:
    """Give ``model`` other parameters on the same memory, until the function that is yielded restores its own."""
    import torch

    # A subclass (quantised, DTensor) cannot be rebuilt from its data alone.
    substitutes = {
        id(weight): torch.nn.Parameter(weight.data, requires_grad=False)
        for weight in model.parameters()
        if type(weight) is torch.nn.Parameter and weight.is_floating_point()
    }
    originals = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]

    def restore() -> None:
        for module, parameters, buffers in originals:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    try:
        for module, parameters, _ in originals:
            for name, parameter in parameters.items():
                if id(parameter) in substitutes:
                    module._parameters[name] = substitutes[id(parameter)]
        yield restore
    finally:
        restore()


def weights_are_float32_after_a_generation(module: ModuleType) -> Outcome:
    """Count the bits of a weight during and after a generation with continuous batching, under ``bf16=True``."""
    import torch

    method = "GRPO" if hasattr(module, "GRPOTrainer") else "RLOO"
    trainer_class, config_class = (getattr(module, f"{method}{kind}") for kind in ("Trainer", "Config"))
    if not any(name in config_class.__dataclass_fields__ for name in _OPTIONS):
        return absent("this release has no continuous batching")

    class Generated(Exception):
        pass

    def bits() -> int:
        return 8 * int(model.get_output_embeddings().weight.element_size())

    def generate_batch(*args: Any, **kwargs: Any) -> Any:
        raise Generated(bits())

    model = tiny_attention_model()
    before = dict(model.named_parameters())
    gradient = torch.ones_like(model.get_output_embeddings().weight)
    model.get_output_embeddings().weight.grad = gradient
    model.generate_batch = generate_batch
    settings = default_arguments(config_class)
    settings.bf16, settings.fp16 = True, False
    on = dict.fromkeys(_OPTIONS, True)
    trainer = stub_that_generates(
        trainer_class, settings, model, **on, generation_config=None, continuous_batching_config=None
    )
    try:
        completions_of(trainer)
    except Generated as generated:
        (inside,) = generated.args
    after = dict(model.named_parameters())
    identical = all(after[name] is parameter for name, parameter in before.items())
    if inside != 16 or not identical:
        raise AssertionError(f"generated with {inside} bits; the parameters are the same: {identical}")
    return judge(float(bits()), right=32.0, wrong=16.0, inside=inside, gradient=str(gradient.dtype))
