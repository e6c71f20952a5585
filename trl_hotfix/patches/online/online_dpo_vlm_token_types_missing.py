"""Online DPO runs a vision-language model without the types of its tokens.

The processors of Gemma 3, and on transformers 5 also those of Qwen-VL, say which tokens are an image's. ``_generate``
takes four named tensors from what the processor returns, and not the types, and ``_forward`` knows the same
four. GRPO and RLOO pass on all that the processor returns. Up to 1.15.0 the processor made the images a second time
with empty texts, which that of Gemma 3 refuses.

``_generate`` hands its result on to ``_forward``, so the types travel beside the images.
"""

from __future__ import annotations

import inspect
from types import ModuleType, SimpleNamespace
from typing import Any

from ...authoring import Call, absent, judge, plain_model, shadowed, wrapper
from ...model import Outcome
from ...testing import (
    CharacterTokenizer,
    absent_if_reexported,
    default_arguments,
    single_process,
    stub_that_generates,
    tiny_causal_lm,
)

_TYPES = ("token_type_ids", "mm_token_type_ids")


@wrapper
def carry_the_types(call: Call) -> Any:
    """Generate with the types that the processor returns, and return them, once for each completion."""
    import torch

    trainer, model, types = call.trainer, plain_model(call.trainer, call["model"]), {}
    # accelerate may keep torch.compile around it, and that takes any argument.
    model = getattr(model, "_orig_mod", model)
    processor = trainer.processing_class
    base = getattr(model, "get_base_model", lambda: model)()
    known = inspect.signature(base.forward).parameters.keys() & set(getattr(processor, "model_input_names", ()))
    names = [name for name in _TYPES if name in known]
    if call["images"] is None or not names:
        return call()
    generated = model.generate

    def process(*args: Any, **kwargs: Any) -> Any:
        batch = processor(*args, **kwargs)
        device = next(model.parameters()).device
        types.update({name: torch.cat([batch[name].to(device)] * 2) for name in names if name in batch})
        return batch

    def generate(*args: Any, **kwargs: Any) -> Any:
        return generated(*args, **{**types, **kwargs})

    with shadowed(trainer, "processing_class", _calling(processor, process)), shadowed(model, "generate", generate):
        *completions, images = call()
    return (*completions, {**(images or {}), **types} or None)


@wrapper
def tell_the_model(call: Call) -> Any:
    """Call the model with the types of the prompt, and with 0 for the tokens of the completion."""
    import torch

    model, images, completions = call["model"], call["vision_inputs"] or {}, call["completion_ids"]
    types = {
        name: torch.cat([images[name], images[name].new_zeros(completions.shape)], dim=1)
        for name in _TYPES
        if name in images
    }
    if not types:
        return call()
    return call.with_(model=_calling(model, lambda *args, **kwargs: model(*args, **{**types, **kwargs})))()


def _calling(wrapped: Any, function: Any) -> Any:
    """Return a view that is called as ``function``."""
    import wrapt

    class View(wrapt.CallableObjectProxy):  # type: ignore[type-arg]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

    return View(wrapped)


def types_reach_the_model(module: ModuleType) -> Outcome:
    """Count the tokens of images in the types of two completions, when they are sampled and when they are scored."""
    import torch

    trainer_class = module.OnlineDPOTrainer
    if reexported := absent_if_reexported(module, trainer_class.training_step):
        return reexported
    if "images" not in inspect.signature(getattr(trainer_class, "_generate", id)).parameters:
        return absent("this release takes no images")
    ids, told = torch.tensor([[3, 2, 2]]), []

    def forward(input_ids: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        told.append(token_type_ids)
        return SimpleNamespace(logits=model.weight[input_ids])

    def generate(input_ids: Any, token_type_ids: Any = None, **kwargs: Any) -> Any:
        told.append(token_type_ids)
        return torch.cat([input_ids, torch.ones_like(input_ids[:, :1])], dim=1)

    class Processor(CharacterTokenizer):
        model_input_names = ("input_ids", "attention_mask", "token_type_ids", "pixel_values")

        def __call__(self, text: Any, **kwargs: Any) -> Any:
            return {"input_ids": ids, "attention_mask": ids.clamp(max=1), "token_type_ids": (ids == 2).long()}

    model, processor = tiny_causal_lm(), Processor()
    model.forward, model.generate = forward, generate
    attributes = {"processing_class": processor, "_tokenizer": processor, "eos_token_ids": [1], "max_length": 64}
    attributes |= {"image_token": None, "is_vision_model": True, "use_transformers_paged": False}
    attributes |= {"generation_config": None, "generation_kwargs": {}}
    trainer = stub_that_generates(trainer_class, default_arguments(module.OnlineDPOConfig), model, **attributes)
    with single_process(module):
        generated = trainer._generate(model, ["a"], [7])
    if len(generated) < 5:
        return absent("in this release the processor of Gemma 3 refuses the texts that it is given")
    trainer._forward(model, *generated)
    return judge(sum(0 if types is None else int(types.sum()) for types in told), right=8, wrong=0)
