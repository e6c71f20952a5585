"""GRPO and RLOO with continuous batching turn the float32 weights that are trained into bfloat16 for good.

With ``use_transformers_paged`` or ``use_transformers_continuous_batching`` the trainer calls ``model.to(bfloat16)``
before ``generate_batch`` (``float16`` with ``fp16``), in place, and never back. ``bf16=True`` means mixed precision, so
these were the master weights. From the first generation on they have 8 bits of precision: an update smaller than 1/256
of a weight is rounded away, and at a learning rate of 1e-6 that is most of them. Buffers, and gradients that are being
accumulated, are cast too.

Here the model has stand-ins for its parameters while it generates: new ones on the same memory, so that ``to`` makes a
copy in bfloat16 for the generation, as before, and leaves the originals alone. They come back afterwards as the objects
that they were, with their gradients, their place in the optimizer and the hooks of DDP. The copy takes half of the
memory of the weights for the time of the generation. Weights that are sharded (FSDP, DeepSpeed ZeRO-3) are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from ..authoring import absent, judge, shadowed
from ..model import Outcome
from ..stubs import completions_of, default_arguments, stub_that_generates, tiny_attention_model

_OPTIONS = ("use_transformers_paged", "use_transformers_continuous_batching")


def keep_the_weights_as_they_are(
    wrapped: Callable[..., Any], instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Generate with copies of the weights, if they would be cast."""
    import torch

    wanted = torch.bfloat16 if instance.args.bf16 else torch.float16 if instance.args.fp16 else None
    batching = any(getattr(instance, name, False) for name in _OPTIONS) and not getattr(instance, "use_vllm", False)
    if not batching or wanted is None:
        return wrapped(*args, **kwargs)
    model = instance.model
    cast = [each for each in model.parameters() if each.is_floating_point() and each.dtype != wanted]
    if not cast:
        return wrapped(*args, **kwargs)
    if instance.is_fsdp_enabled or any(hasattr(each, "ds_id") for each in cast):
        if not getattr(instance, "_trl_hotfix_said_cast", False):
            instance._trl_hotfix_said_cast = True
            logging.getLogger("trl_hotfix").warning(
                "grpo-continuous-batching-casts-master-weights: the weights are sharded, and generating with "
                "continuous batching casts them to %s for good. Use vLLM, or leave use_transformers_paged and "
                "use_transformers_continuous_batching off.",
                wanted,
            )
        return wrapped(*args, **kwargs)
    with _stand_ins(model) as give_back:
        generate_batch = model.generate_batch

        def generate_and_give_back(*args: Any, **kwargs: Any) -> Any:
            # Up to 0.23 what follows in the same method scores the completions.
            try:
                return generate_batch(*args, **kwargs)
            finally:
                give_back()

        with shadowed(model, "generate_batch", generate_and_give_back):
            return wrapped(*args, **kwargs)


@contextmanager
def _stand_ins(model: Any) -> Iterator[Callable[[], None]]:
    """Until it is told to give them back, ``model`` has other parameters on the same memory instead of its own."""
    import torch

    # A subclass (quantised, DTensor) is not ours to make another of.
    plain = {
        id(each): torch.nn.Parameter(each.data, requires_grad=False)
        for each in model.parameters()
        if type(each) is torch.nn.Parameter and each.is_floating_point()
    }
    kept = [(module, dict(module._parameters), dict(module._buffers)) for module in model.modules()]

    def give_back() -> None:
        for module, parameters, buffers in kept:
            module._parameters.update(parameters)
            module._buffers.update(buffers)

    try:
        for module, parameters, _ in kept:
            for name, parameter in parameters.items():
                if id(parameter) in plain:
                    module._parameters[name] = plain[id(parameter)]
        yield give_back
    finally:
        give_back()


def weights_are_float32_after_a_generation(module: ModuleType) -> Outcome:
    """How many bits has a weight before, in and after a generation with continuous batching, under ``bf16=True``?"""
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
    same = all(after[name] is its for name, its in before.items())
    if inside != 16 or not same:
        raise AssertionError(f"generated with {inside} bits; the parameters are the same: {same}")
    return judge(float(bits()), right=32.0, wrong=16.0, inside=inside, gradient=str(gradient.dtype))
